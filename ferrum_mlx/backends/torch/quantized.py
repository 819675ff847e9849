"""K and V in 8 bits: pools that read and write like tensors, and transformers' attention over the same."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from ferrum_mlx.errors import UsageError
from ferrum_mlx.kv.precision import GROUP, groups_of

ROUNDED = "ferrum_rounded"  # attention as the model's own file has it, over rounded K and V
Place: TypeAlias = slice | torch.Tensor
LARGEST = 255  # code
LEAST_SCALE = 1e-7  # more than nothing in float16, too


class QuantizedPool:
    """Reads and writes like a tensor [slots, heads, head_dim] of `dtype`, and keeps codes of 8 bits."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        slots, heads, head_dim = shape
        groups = groups_of(head_dim)
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, device
        self._codes = torch.zeros(slots, heads, groups * GROUP, dtype=torch.uint8, device=device)
        self._scales, self._biases = (
            torch.zeros(slots, heads, groups, dtype=dtype, device=device) for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._biases.nbytes

    def __setitem__(self, where: Place, rows: torch.Tensor) -> None:
        self._codes[where], self._scales[where], self._biases[where] = quantize(rows)

    def __getitem__(self, where: Place) -> torch.Tensor:
        parts = self._codes[where], self._scales[where], self._biases[where]
        return dequantize(*parts, self.shape[-1])

    def index_copy_(self, dim: int, where: torch.Tensor, rows: torch.Tensor) -> None:
        """As a tensor's; the dimension is that of slots."""
        self[where] = rows

    def index_select(self, dim: int, where: torch.Tensor) -> torch.Tensor:
        """As a tensor's; the dimension is that of slots."""
        return self[where]

    def whole(self, num_slots: int) -> torch.Tensor:
        """For the check at load: what can stand in its place, and keeps every bit."""
        return torch.zeros(num_slots, *self.shape[1:], dtype=self.dtype, device=self.device)

    def read_back(self, slots: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the check at load: what is read of rows written to slots, and the rows rounded."""
        where = torch.from_numpy(slots).to(self.device)
        given = torch.from_numpy(rows).to(self.device, self.dtype)
        self[where] = given
        got, want = (array.float().cpu().numpy() for array in (self[where], rounded(given)))
        return got, want


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[…, head_dim] → codes […, groups · GROUP] uint8, scales and biases […, groups] of rows' dtype."""
    groups = groups_of(rows.shape[-1])
    if missing := groups * GROUP - rows.shape[-1]:
        rows = F.pad(rows, (0, missing))
    values = rows.unflatten(-1, (groups, GROUP)).float()
    low, high = values.aminmax(dim=-1)
    scales = ((high - low) / LARGEST).clamp_(min=LEAST_SCALE).to(rows.dtype)  # codes make up for rounding it
    codes = torch.round((values - low[..., None]) / scales.float()[..., None]).clamp_(0, LARGEST)
    return codes.flatten(-2).to(torch.uint8), scales, low.to(rows.dtype)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """[…, head_dim] of the scales' dtype, computed in float32."""
    values = codes.float().unflatten(-1, (scales.shape[-1], GROUP))
    values = values.mul_(scales.float()[..., None]).add_(biases.float()[..., None])
    return values.flatten(-2)[..., :head_dim].to(scales.dtype)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """What a pool gives back for what was written."""
    return dequantize(*quantize(rows), rows.shape[-1])


def _attend_rounded(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """The explicit attention of the model's own file, over what our pools would give it.

    Not in the cache: some models keep something smaller there, and make K and V of it.
    """
    own = sys.modules[type(module).__module__].eager_attention_forward
    result: tuple[torch.Tensor, Any] = own(module, query, rounded(key), rounded(value), *args, **kwargs)
    return result


AttentionInterface.register(ROUNDED, _attend_rounded)
AttentionMaskInterface.register(ROUNDED, eager_mask)


def check_bits(bits: int | None) -> None:
    """Raises UsageError for what only MLX keeps."""
    if bits not in (None, 8):
        raise UsageError(
            f"--kv-bits is {bits}", "allowed on torch: 8", "take 8, leave it away, or --backend mlx"
        )
