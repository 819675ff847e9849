"""Products on a CPU, by the routine that is fastest for their rows.

torch hands x · Wᵀ to MKL, which on some CPUs takes two to three times as long for one to four rows as it
takes for the same the other way round, W · xᵀ. A single row is quickest with the BLAS in numpy's wheel,
which shares torch's memory. bench/NOTES.md has the figures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] · weight [out, in] transposed + bias → [..., out], as torch.nn.functional.linear."""
    if weight.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1:
        y = torch.from_numpy(weight.numpy() @ rows[0].numpy())[None]
    else:
        y = (weight @ rows.T).T.contiguous()
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], len(weight))
