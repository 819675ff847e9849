"""What is done to logits between the model and the draw: a function a stage, [R, vocab] float32 → the same.

Every row is computed by itself: which rows share a call changes none of them, not by a bit. Stages
return a new tensor; -inf is a token that cannot come.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ferrum_mlx.backends.torch.device import indices, upload
from ferrum_mlx.batch import RowSampling

# Before the argmax of greedy rows


def is_adjusted(row: RowSampling) -> bool:
    """Whether `adjust` may change that row."""
    params = row.params
    return bool(
        params.logit_bias
        or params.penalizes
        or params.banned_token_ids
        or row.bad_sequences
        or row.position < params.min_tokens
    )


def adjust(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Logit bias, then penalties, as in vLLM and mlx-lm, then bans."""
    return _bar(_penalize(_add_bias(logits, rows), rows), rows)


def _add_bias(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    entries = [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
        if token < logits.shape[-1]
    ]
    if not entries:
        return logits
    at, tokens, biases = zip(*entries, strict=True)
    place = indices(at, logits.device), indices(tokens, logits.device)
    added = upload(np.array(biases), logits.device, logits.dtype)
    return logits.index_put(place, logits[place] + added)


def _penalize(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """vLLM's formulas: repetition over prompt and output, then presence and frequency over the output."""
    at, tokens, factors, costs = [], [], [], []
    for i, row in enumerate(rows):
        params = row.params
        if not params.penalizes:
            continue
        output, counts = np.unique(np.array(row.output, dtype=np.int64), return_counts=True)
        repeats = params.repetition_penalty != 1
        seen = np.union1d(output, np.array(row.prompt, dtype=np.int64)) if repeats else output
        cost = np.zeros(len(seen))
        cost[np.searchsorted(seen, output)] = params.presence_penalty + params.frequency_penalty * counts
        at.append(np.full(len(seen), i))
        tokens.append(seen)
        factors.append(np.full(len(seen), params.repetition_penalty))
        costs.append(cost)
    if not any(map(len, tokens)):
        return logits
    device = logits.device
    place = indices(np.concatenate(at), device), indices(np.concatenate(tokens), device)
    factor, less = (upload(np.concatenate(parts), device, logits.dtype) for parts in (factors, costs))
    old = logits[place]
    return logits.index_put(place, torch.where(old > 0, old / factor, old * factor) - less)


def _bar(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    return _fill(logits, [row.barred for row in rows], -torch.inf)


# Of rows with a temperature, already applied


def keep_min_p(scaled: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Drop tokens less than min_p times as likely as the likeliest."""
    below = column(scaled, [math.log(row.params.min_p) for row in rows])
    return scaled.masked_fill(~(scaled >= scaled.amax(dim=-1, keepdim=True) + below), -torch.inf)


def keep_likeliest(scaled: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """Drop what top-k, then top-p drop; tokens as likely as the last one kept stay."""
    vocab = scaled.shape[-1]
    ranked = scaled.sort(dim=-1, descending=True).values
    rank = torch.arange(vocab, device=scaled.device)[None]
    top_k = column(rank, [min(row.params.top_k or vocab, vocab) for row in rows])
    ranked = ranked.masked_fill(rank >= top_k, -torch.inf)
    probabilities = torch.softmax(ranked, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # mass of the likelier tokens
    top_p = column(scaled, [row.params.top_p for row in rows])
    dropped = (before >= top_p) & (rank > 0) & (top_p < 1)  # the likeliest always stays
    last_kept = ranked.masked_fill(dropped | ranked.isinf(), torch.inf).amin(dim=-1, keepdim=True)
    return scaled.masked_fill(~(scaled >= last_kept), -torch.inf)


def excludes_top(row: RowSampling) -> bool:
    """Whether the row's coin lets XTC happen: a pure function of (seed, sample index, output position)."""
    coin = int.from_bytes(digest(row, "xtc")) >> 11  # 53 bits: a fraction that a float holds exactly
    return coin / 2**53 < row.params.xtc_probability


def exclude_top(scaled: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """XTC: of the tokens above the threshold all but the least likely go; ids that end the request stay."""
    probabilities = torch.softmax(scaled, dim=-1)
    threshold = column(scaled, [row.params.xtc_threshold for row in rows])
    above = probabilities > threshold
    least = probabilities.masked_fill(~above, torch.inf).amin(dim=-1, keepdim=True)
    dropped = _fill(probabilities > least, [row.end_ids for row in rows], False)
    return scaled.masked_fill(dropped, -torch.inf)


def digest(row: RowSampling, use: str = "") -> bytes:
    """8 bytes that differ by use, seed, sample index and output position."""
    name = f"{use}{row.seed} {row.sample_index} {row.position}".encode()
    return hashlib.blake2b(name, digest_size=8).digest()


def column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """[R, 1], of that tensor's dtype and device."""
    return upload(np.array(values), like.device, like.dtype)[:, None]


def _fill(array: torch.Tensor, ids: Sequence[Iterable[int]], value: float | bool) -> torch.Tensor:
    """Put a value at some ids of each row; those the vocabulary lacks are passed over."""
    vocab = array.shape[-1]
    entries = [(i, token) for i, of_row in enumerate(ids) for token in of_row if 0 <= token < vocab]
    if not entries:
        return array
    at, tokens = zip(*entries, strict=True)
    place = indices(at, array.device), indices(tokens, array.device)
    return array.index_put(place, torch.full((), value, dtype=array.dtype, device=array.device))
