"""Logprobs of a step's rows: natural logs, of the model's own logits; only what is asked for is read back."""

from __future__ import annotations

import torch

from ferrum_mlx.backends.torch.device import Download, indices
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

    def __init__(
        self, logits: torch.Tensor, rows: list[int], token_ids: torch.Tensor, counts: list[int]
    ) -> None:
        self._counts = counts
        at = indices(rows, logits.device)
        width = min(max(counts, default=0), logits.shape[-1])
        starts = range(0, len(rows), _ROWS_AT_ONCE)
        parts = [slice(start, start + _ROWS_AT_ONCE) for start in starts]
        scored = [_score(logits[at[part]], token_ids[part], width) for part in parts]
        self._arrays = [Download(torch.cat(arrays)) for arrays in zip(*scored, strict=True)]

    def read(self) -> list[TokenLogprobs]:
        """One a row, in their order."""
        if not self._arrays:
            return []
        token_ids, logprobs, ranks, top_ids, top_logprobs = (array.read() for array in self._arrays)
        columns = zip(token_ids, logprobs, ranks, top_ids, top_logprobs, self._counts, strict=True)
        return [
            TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True))[:count])
            for token, logprob, rank, ids, values, count in columns
        ]


def _score(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """[S] token ids, their logprobs and ranks; [S, width] ids and logprobs of the likeliest, best first."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = _likeliest(logprobs, width)
    return token_ids, own[:, 0], ranks, top, logprobs.gather(-1, top)


def _likeliest(logprobs: torch.Tensor, width: int) -> torch.Tensor:
    """[S, width] ids; of equally likely ones the lowest first, whatever the width.

    torch breaks ties as it likes, and half precision has many. So each value gets a number of its own:
    the bits of the float, made to sort as integers, before the id counted down.
    """
    bits = (logprobs + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    vocab = logprobs.shape[-1]
    from_the_end = torch.arange(vocab - 1, -1, -1, device=logprobs.device)
    return ((ordered.long() << 32) | from_the_end).topk(width, dim=-1).indices
