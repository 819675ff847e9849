"""Choosing tokens on the device, one row a token, many requests' rows at once.

Order: logit bias → penalties → bans, bad words and, before min_tokens, what ends the request → the
argmax of greedy rows → temperature → min-p → top-k → top-p over what is left → XTC → the Gumbel-max
draw. Logprobs are of the model's own logits, before all of it (ferrum_mlx.backends.mlx.logprobs).

Only the rows that want a stage pay for it. A row's noise is a pure function of (seed, sample index,
output position), so neither batchmates nor chunking nor a preemption can change a request's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ferrum_mlx.backends.mlx import processors
from ferrum_mlx.batch import RowSampling

_STAGES: tuple[
    tuple[Callable[[RowSampling], bool], Callable[[mx.array, Sequence[RowSampling]], mx.array]], ...
] = (
    (lambda row: row.params.min_p > 0, processors.keep_min_p),
    (lambda row: row.params.top_k > 0 or row.params.top_p < 1, processors.keep_likeliest),
    (processors.excludes_top, processors.exclude_top),
)


def sample(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """logits [R, vocab] → token ids [R] uint32."""
    tokens = mx.argmax(logits, axis=-1)
    busy = [i for i, row in enumerate(rows) if not row.params.greedy or processors.is_adjusted(row)]
    if busy:
        index = mx.array(busy)
        tokens[index] = _choose(logits[index].astype(mx.float32), [rows[i] for i in busy])
    return tokens


def _choose(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    logits = processors.adjust(logits, rows)
    tokens = mx.argmax(logits, axis=-1)
    hot = [i for i, row in enumerate(rows) if not row.params.greedy]
    if hot:
        index = mx.array(hot)
        tokens[index] = _draw(logits[index], [rows[i] for i in hot])
    return tokens


def _draw(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    scaled = logits / mx.array([row.params.temperature for row in rows])[:, None]
    for wants, stage in _STAGES:
        chosen = [i for i, row in enumerate(rows) if wants(row)]
        if chosen:
            index = mx.array(chosen)
            scaled[index] = stage(scaled[index], [rows[i] for i in chosen])
    keys = mx.stack([noise_key(row) for row in rows])
    noise = mx.vmap(lambda key: mx.random.gumbel(logits.shape[-1:], key=key))(keys)
    return mx.argmax(scaled + noise, axis=-1)


def noise_key(row: RowSampling) -> mx.array:
    return mx.random.key(int.from_bytes(processors.digest(row), "little"))
