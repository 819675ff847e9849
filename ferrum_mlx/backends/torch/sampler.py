"""Choosing tokens on the device, one row a token, many requests' rows at once.

Order, as on every backend: logit bias → penalties → bans, bad words and, before min_tokens, what ends the
request → the argmax of greedy rows → temperature → min-p → top-k → top-p over what is left → XTC → the
Gumbel-max draw. Logprobs are of the model's own logits, before all of it (logprobs.py).

Only the rows that want a stage pay for it. A row's noise is a pure function of (seed, sample index, output
position), so neither batchmates nor chunking nor a preemption can change a request's output. It is made
of integers, by splitmix64, so it is the same on every device of torch (for MPS it is made on the CPU: see
device.to_sample); MLX has a generator of its own, so a seed gives other samples there. Greedy rows are the
same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ferrum_mlx.backends.torch import processors
from ferrum_mlx.backends.torch.device import indices
from ferrum_mlx.batch import RowSampling

_STAGES: tuple[
    tuple[Callable[[RowSampling], bool], Callable[[torch.Tensor, Sequence[RowSampling]], torch.Tensor]], ...
] = (
    (lambda row: row.params.min_p > 0, processors.keep_min_p),
    (lambda row: row.params.top_k > 0 or row.params.top_p < 1, processors.keep_likeliest),
    (processors.excludes_top, processors.exclude_top),
)


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """logits [R, vocab] → token ids [R] int64."""
    tokens = torch.argmax(logits, dim=-1)
    busy = [i for i, row in enumerate(rows) if not row.params.greedy or processors.is_adjusted(row)]
    if busy:
        at = indices(busy, logits.device)
        tokens[at] = _choose(logits[at].float(), [rows[i] for i in busy])
    return tokens


def _choose(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    logits = processors.adjust(logits, rows)
    tokens = torch.argmax(logits, dim=-1)
    hot = [i for i, row in enumerate(rows) if not row.params.greedy]
    if hot:
        at = indices(hot, logits.device)
        tokens[at] = _draw(logits[at], [rows[i] for i in hot])
    return tokens


def _draw(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    scaled = logits / processors.column(logits, [row.params.temperature for row in rows])
    for wants, stage in _STAGES:
        chosen = [i for i, row in enumerate(rows) if wants(row)]
        if chosen:
            at = indices(chosen, logits.device)
            scaled[at] = stage(scaled[at], [rows[i] for i in chosen])
    return torch.argmax(scaled + gumbel(rows, logits), dim=-1)


def gumbel(rows: Sequence[RowSampling], logits: torch.Tensor) -> torch.Tensor:
    """[R, vocab] float32: each row's noise, for logits of that shape."""
    keys = [int.from_bytes(processors.digest(row), "little", signed=True) for row in rows]
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    state = tokens[None] * _GOLDEN + indices(keys, logits.device)[:, None]
    for shift, factor in _MIX:
        state = _xor_shifted(state, shift) * factor
    bits = _xor_shifted(state, 31)
    uniform = ((bits & _LOW_63) | 1).float() * 2.0**-63  # small values keep all of their bits
    return -torch.log(-torch.log1p(-uniform))


# splitmix64, whose products wrap around in two's complement.
def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_LOW_63 = (1 << 63) - 1


def _xor_shifted(state: torch.Tensor, shift: int) -> torch.Tensor:
    """state ^ (state >> shift), the sign bit shifted as any other."""
    return state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))
