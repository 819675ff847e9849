"""Choosing tokens on the device, one row a token, many requests' rows at once.

Order, as in vLLM: temperature, top-k, top-p over what is left, then the Gumbel-max draw. A row's noise
is a pure function of (seed, sample index, output position), so neither batchmates nor chunking nor a
preemption can change a request's output.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx

from ferrum_mlx.batch import RowSampling

GREEDY_BELOW = 1e-5  # dividing by less overflows float32


def sample(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """logits [R, vocab] → token ids [R] uint32; a temperature below GREEDY_BELOW takes the likeliest."""
    greedy = mx.argmax(logits, axis=-1)
    hot = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    if not hot:
        return greedy
    index = mx.array(hot)
    chosen = [rows[i] for i in hot]
    scaled = logits[index].astype(mx.float32) / mx.array([row.params.temperature for row in chosen])[:, None]
    if any(row.params.top_k or row.params.top_p < 1 for row in chosen):
        scaled = _keep_likeliest(scaled, chosen)
    noise = mx.stack([mx.random.gumbel((logits.shape[-1],), key=noise_key(row)) for row in chosen])
    greedy[index] = mx.argmax(scaled + noise, axis=-1)
    return greedy


def noise_key(row: RowSampling) -> mx.array:
    name = f"{row.seed} {row.sample_index} {row.position}".encode()
    return mx.random.key(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


def _keep_likeliest(scaled: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Put -inf where top-k or top-p drop a token; tokens as likely as the last one kept stay."""
    vocab = scaled.shape[-1]
    ranked = -mx.sort(-scaled, axis=-1)
    top_k = mx.array([row.params.top_k or vocab for row in rows])[:, None]
    ranked = mx.where(mx.arange(vocab)[None] < top_k, ranked, -mx.inf)
    probabilities = mx.softmax(ranked, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities  # mass of the likelier tokens
    top_p = mx.array([row.params.top_p for row in rows])[:, None]
    dropped = (before >= top_p) & (mx.arange(vocab)[None] > 0) & (top_p < 1)  # the likeliest always stays
    last_kept = mx.where(dropped | mx.isinf(ranked), mx.inf, ranked).min(axis=-1, keepdims=True)
    return mx.where(scaled >= last_kept, scaled, -mx.inf)
