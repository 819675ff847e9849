"""Logprobs of a step's rows: natural logs, of the model's own logits; only what is asked for is read back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ferrum_mlx.batch import TokenLogprobs

_ROWS_AT_ONCE = 64  # float32 copies of that many rows of the vocabulary live at a time


class RowLogprobs:
    """Logprobs of some rows of a step, on the device until `read`.

    Args:
        logits: [R, vocab].
        rows: [S], which of them.
        token_ids: [S], each row's token.
        counts: [S], how many of each row's likeliest tokens to tell besides, at most the vocabulary.
    """

    def __init__(self, logits: mx.array, rows: list[int], token_ids: mx.array, counts: list[int]) -> None:
        self._counts = counts
        width = min(max(counts, default=0), logits.shape[-1])
        starts = range(0, len(rows), _ROWS_AT_ONCE)
        parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
        scored = [_score(logits[mx.array(rows[part])], token_ids[part], width) for part in parts]
        self.arrays = [mx.concatenate(list(arrays)) for arrays in zip(*scored, strict=True)]

    def read(self) -> list[TokenLogprobs]:
        """One a row, in their order."""
        if not self.arrays:
            return []
        token_ids, logprobs, ranks, top_ids, top_logprobs = (np.array(a).tolist() for a in self.arrays)
        columns = zip(token_ids, logprobs, ranks, top_ids, top_logprobs, self._counts, strict=True)
        return [
            TokenLogprobs(token, logprob, rank, _best(ids, values, count))
            for token, logprob, rank, ids, values, count in columns
        ]


def _best(ids: list[int], logprobs: list[float], count: int) -> tuple[tuple[int, float], ...]:
    pairs = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])


def _score(logits: mx.array, token_ids: mx.array, width: int) -> tuple[mx.array, ...]:
    """[S] token ids, their logprobs and ranks; [S, width] ids and logprobs of the likeliest, in no order."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, token_ids[:, None].astype(mx.int32), axis=-1)
    ranks = (logprobs > own).sum(axis=-1) + 1
    # MLX breaks ties by index on every device, so equally likely ones are told lowest first, whatever the
    # width; half precision has many, and the longest list beside a row must not change the row's.
    top = mx.argpartition(-logprobs, max(width - 1, 0), axis=-1)[:, :width]
    return token_ids, own[:, 0], ranks, top, mx.take_along_axis(logprobs, top, axis=-1)
