"""What an item says of its rows."""

from __future__ import annotations

from ferrum_mlx.batch import RowSampling, UnifiedItem
from ferrum_mlx.sampling import SamplingParams


def test_each_row_behind_a_draft_counts_it_as_output() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    sampling = RowSampling(params=params, position=1, output=(5,))
    item = UnifiedItem(cache_id=1, q_tokens=(5, 6, 7), pos_offset=3, verify=True, sampling=sampling)
    rows = [(row.position, tuple(row.output)) for row in item.row_sampling]
    assert rows == [(1, (5,)), (2, (5, 6)), (3, (5, 6, 7))]
