"""The verify rule.

Every row of a verify item samples the target's own token, after its processors and with the noise of its
output position, as if the drafts before it were output. So row i is the plain run's next token as long
as the drafts before it are; where draft i is that token, row i + 1 is the one after it. What comes out is
the plain run's output at any temperature, whoever guessed, however long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """What a verify step outputs.

    The drafts that were right, then the target's token instead of the first wrong one (recovered), or
    behind them all (bonus).

    Args:
        sampled: one a row: len(drafts) + 1; one, where there are no drafts.
    """
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)))
    return tuple(sampled[: right + 1])
