"""What is done to logits between the model and the draw: a function a stage, [R, vocab] float32 → the same.

Every row is computed by itself: which rows share a call changes none of them, not by a bit. Stages
return a new array; -inf is a token that cannot come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

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


def adjust(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Logit bias, then penalties, as in vLLM and mlx-lm, then bans."""
    return _bar(_penalize(_add_bias(logits, rows), rows), rows)


def _add_bias(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    entries = [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
        if token < logits.shape[-1]
    ]
    if not entries:
        return logits
    at, tokens, biases = zip(*entries, strict=True)
    return logits.at[mx.array(at), mx.array(tokens)].add(mx.array(biases))


def _penalize(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
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
    place = mx.array(np.concatenate(at)), mx.array(np.concatenate(tokens))
    factor, less = (mx.array(np.concatenate(parts).astype(np.float32)) for parts in (factors, costs))
    old = logits[place]
    return _put(logits, place, mx.where(old > 0, old / factor, old * factor) - less)


def _bar(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    return _fill(logits, [row.barred for row in rows], -mx.inf)


# Of rows with a temperature, already applied


def keep_min_p(scaled: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Drop tokens less than min_p times as likely as the likeliest."""
    min_p = mx.log(mx.array([row.params.min_p for row in rows]))[:, None]
    return mx.where(scaled >= scaled.max(axis=-1, keepdims=True) + min_p, scaled, -mx.inf)


def keep_likeliest(scaled: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Drop what top-k, then top-p drop; tokens as likely as the last one kept stay."""
    vocab = scaled.shape[-1]
    ranked = -mx.sort(-scaled, axis=-1)
    top_k = mx.array([min(row.params.top_k or vocab, vocab) for row in rows])[:, None]
    ranked = mx.where(mx.arange(vocab)[None] < top_k, ranked, -mx.inf)
    probabilities = mx.softmax(ranked, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities  # mass of the likelier tokens
    top_p = mx.array([row.params.top_p for row in rows])[:, None]
    dropped = (before >= top_p) & (mx.arange(vocab)[None] > 0) & (top_p < 1)  # the likeliest always stays
    last_kept = mx.where(dropped | mx.isinf(ranked), mx.inf, ranked).min(axis=-1, keepdims=True)
    return mx.where(scaled >= last_kept, scaled, -mx.inf)


def excludes_top(row: RowSampling) -> bool:
    """Whether the row's coin lets XTC happen: a pure function of (seed, sample index, output position)."""
    coin = int.from_bytes(digest(row, "xtc")) >> 11  # 53 bits: a fraction that a float holds exactly
    return coin / 2**53 < row.params.xtc_probability


def exclude_top(scaled: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """XTC: of the tokens above the threshold all but the least likely go; ids that end the request stay."""
    probabilities = mx.softmax(scaled, axis=-1)
    threshold = mx.array([row.params.xtc_threshold for row in rows])[:, None]
    least = mx.where(probabilities > threshold, probabilities, mx.inf).min(axis=-1, keepdims=True)
    dropped = _fill(probabilities > least, [row.end_ids for row in rows], False)
    return mx.where(dropped, -mx.inf, scaled)


def digest(row: RowSampling, use: str = "") -> bytes:
    """8 bytes that differ by use, seed, sample index and output position."""
    name = f"{use}{row.seed} {row.sample_index} {row.position}".encode()
    return hashlib.blake2b(name, digest_size=8).digest()


def _fill(array: mx.array, ids: Sequence[Iterable[int]], value: float | bool) -> mx.array:
    """Put a value at some ids of each row; those the vocabulary lacks are passed over."""
    vocab = array.shape[-1]
    entries = [(i, token) for i, of_row in enumerate(ids) for token in of_row if 0 <= token < vocab]
    if not entries:
        return array
    at, tokens = zip(*entries, strict=True)
    return _put(array, (mx.array(at), mx.array(tokens)), mx.array(value, dtype=array.dtype))


def _put(array: mx.array, place: tuple[mx.array, mx.array], values: mx.array) -> mx.array:
    array = mx.array(array)  # a name of its own: an assignment to the caller's would reach the caller
    array[place] = values
    return array
