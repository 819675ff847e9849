"""Linear layers on a CPU with their weights packed in 8 or 4 bits: one token then reads a quarter or less.

Few rows go through torch's own packed products, which take bfloat16 activations. Many rows are worth
unpacking the layer for, into what this CPU multiplies fastest; nothing unpacked is kept. All else of a
model stays float32. A layer is packed as it is stored: 4-bit codes of a file are taken as they are,
anything else gets 8 bits a weight with a scale a row, which costs next to nothing of quality.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ferrum_mlx.backends.torch.device import give_back
from ferrum_mlx.backends.torch.products import linear

if TYPE_CHECKING:
    from ferrum_mlx.gguf_quants import QuantizedTensor

GROUP = 32  # weights that share a scale in 4 bits
_ROWS_AT_ONCE = 4096  # of a layer: float32 copies of so many live while it is packed
STRIDE = 16  # weights that torch's products take at once
TOLERANCE = 0.05  # of the largest value: bfloat16's rounding of inputs and output, with room


class Stored(Protocol):
    """Weights as a file has them, by the model's names for them."""

    def codes(self, name: str) -> QuantizedTensor | None:
        """None where it is stored otherwise, or not at all."""
        ...

    def values(self, name: str) -> torch.Tensor:
        """[out, in] float32."""
        ...


def placeholder(shape: tuple[int, ...]) -> torch.Tensor:
    """Stands for a weight that is not read yet: float32 zeros in the memory of one."""
    return torch.zeros(()).expand(shape)


def is_unread(weight: torch.Tensor) -> bool:
    return weight.numel() > 1 and not any(weight.stride())


class PackedLinear(nn.Module):
    """x [..., in] → [..., out] of x's dtype.

    Args:
        arrays: the packed weight; `ROWS` names them, each with the dimension that counts output rows.
    """

    ROWS: ClassVar[dict[str, int]]
    KIND: ClassVar[str]
    FEW: ClassVar[int]  # rows that are not worth unpacking for: bench/NOTES.md
    BLOCK: ClassVar[int] = 1  # output rows that are packed together

    def __init__(self, in_features: int, bias: torch.Tensor | None, *arrays: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.bias = in_features, bias
        self._joined: dict[tuple[int, ...], PackedLinear | None] = {}  # with which layers behind it
        for (name, rows), array in zip(self.ROWS.items(), arrays, strict=True):
            setattr(self, name, array)  # no buffer: those are found by a search
            self.out_features = array.shape[rows]

    @abstractmethod
    def few(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], both bfloat16."""

    @abstractmethod
    def many(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out] float32, multiplied in x's dtype."""

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] float32, unpacked: for models that reach into their layers."""
        return self.many(torch.eye(self.in_features)).T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        flat = x.reshape(-1, self.in_features)
        if x.numel() <= self.FEW * self.in_features:
            y = self.few(flat.bfloat16()).to(x.dtype)
        else:
            y = self.many(flat.to(wide())).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def __deepcopy__(self, memo: object) -> PackedLinear:
        return self  # nothing in it changes, and it is large

    @classmethod
    def joined(cls, layers: Sequence[PackedLinear]) -> PackedLinear | None:
        """Layers of the same input as one, over memory that they go on using; None if it cannot be."""
        key = tuple(map(id, layers))
        if key not in layers[0]._joined:
            layers[0]._joined[key] = cls._join(layers)
        return layers[0]._joined[key]

    @classmethod
    def _join(cls, layers: Sequence[PackedLinear]) -> PackedLinear | None:
        sizes = [layer.out_features for layer in layers]
        if len({layer.bias is None for layer in layers}) > 1 or any(size % cls.BLOCK for size in sizes):
            return None
        wholes = []
        for name, rows in cls.ROWS.items():
            wholes.append(torch.cat([getattr(layer, name) for layer in layers], dim=rows))
            for layer, part in zip(layers, wholes[-1].split(sizes, dim=rows), strict=True):
                setattr(layer, name, part)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return cls(layers[0].in_features, torch.cat(biases) if biases else None, *wholes)

    def first_rows(self, count: int) -> PackedLinear:
        """At most so many output rows, a multiple of BLOCK, of the same memory."""
        parts = [
            getattr(self, name).narrow(rows, 0, min(count, self.out_features))
            for name, rows in self.ROWS.items()
        ]
        return type(self)(self.in_features, None if self.bias is None else self.bias[:count], *parts)

    @property
    def nbytes(self) -> int:
        arrays = [getattr(self, name) for name in self.ROWS]
        return sum(array.nbytes for array in arrays) + (0 if self.bias is None else self.bias.nbytes)


class Int8Linear(PackedLinear):
    """Codes [out, in] int8 and a bfloat16 scale [out] for each row."""

    ROWS: ClassVar = {"codes": 0, "scales": 0}
    KIND = "int8 per channel"
    FEW = 32
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        weight = linear.weight.detach()
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(len(weight), dtype=torch.bfloat16)
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            part = weight[rows].float()
            scales[rows] = part.abs().amax(dim=1).clamp(min=1e-30) / 127
            # the scales were rounded first: the codes make up for it
            codes[rows] = torch.round(part / scales[rows].float()[:, None]).clamp_(-127, 127)
        return cls(linear.in_features, _bias(linear), codes, scales)

    def few(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.scales)

    def many(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.codes.to(x.dtype)).float() * self.scales


class Int4Linear(PackedLinear):
    """Codes 0 … 15 and a scale and a zero point for each GROUP of a row: (code - 8) · scale + zero.

    `packed` is in the order that torch's product wants, which is its own business. `halves` [out, in / 2]
    uint8 are the same codes again, a row's left half in the low bits, its right half in the high ones.
    `scales` [in / GROUP, out, 2] bfloat16 are the scale and the zero point.
    """

    ROWS: ClassVar = {"packed": 0, "halves": 0, "scales": 1}
    KIND = f"int4 in groups of {GROUP}"
    FEW = 128
    BLOCK = 64
    packed: torch.Tensor
    halves: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, linear: nn.Linear, stored: QuantizedTensor | None = None) -> Int4Linear:
        """With the file's own codes, or, without them, the weights rounded to the nearest."""
        codes, scales, zeros = _rounded(linear.weight) if stored is None else _of_file(stored)
        left, right = codes.chunk(2, dim=1)
        return cls(
            linear.in_features,
            _bias(linear),
            torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1),
            left | (right << 4),
            torch.stack([scales, zeros], dim=2).transpose(0, 1).to(torch.bfloat16).contiguous(),
        )

    def few(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales.contiguous())

    def many(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(self.out_features, self.in_features, dtype=x.dtype)
        left, right = weight.chunk(2, dim=1)
        left.copy_(self.halves & 15)
        right.copy_(self.halves >> 4)
        scales, zeros = self.scales.float().permute(2, 1, 0)[..., None]
        lowest = (zeros - 8 * scales).to(x.dtype)  # the value of code 0
        weight.unflatten(1, (-1, GROUP)).mul_(scales.to(x.dtype)).add_(lowest)
        return linear(x, weight).float()


def _bias(linear: nn.Linear) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach().float()


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in] uint8, scales and zero points [out, in / GROUP], by each group's extremes."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2)
    scales = ((high - low) / 15).clamp(min=1e-30).to(torch.bfloat16).float()
    zeros = (low + 8 * scales).to(torch.bfloat16).float()
    codes = torch.round((groups - zeros[..., None]) / scales[..., None] + 8).clamp_(0, 15)
    return codes.flatten(1).to(torch.uint8), scales, zeros


def _of_file(stored: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = stored.scales.astype(np.float32)
    arrays = np.ascontiguousarray(stored.codes), scales, stored.biases + 8 * scales
    codes, scale, zero = map(torch.from_numpy, arrays)
    return codes, scale, zero


class RoundedEmbedding(nn.Module):
    """A table that is only looked up: 16 bits a weight are kept, float32 comes out."""

    weight: torch.Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        kept = table.weight.detach()
        self.register_buffer("weight", kept.half() if kept.dtype == torch.float32 else kept)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight).float()


@cache
def wide() -> torch.dtype:
    """What many rows are multiplied in: bfloat16 where the CPU has products of it, which are twice as fast
    there as float32's; elsewhere they are several times slower."""
    has = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, name, lambda: False)() for name in has):
        return torch.bfloat16
    return torch.float32


@torch.inference_mode()
def pack(model: nn.Module, stored: Stored | None = None, kind: str = "") -> tuple[str, list[str]]:
    """Replace a model's Linear layers in place; all other weights become float32, tables of 16 bits excepted.

    Args:
        stored: has the codes of layers, and the values of those whose weights are placeholders.
        kind: "int8" or "int4" for every layer alike; "" as they are stored.

    Returns:
        What the weights are now, in words, and notes of what could not be packed.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    kinds: Counter[str] = Counter()
    kept: dict[str, str] = {}
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        codes = None
        if stored and type(module) is nn.Linear:
            codes = None if kind else stored.codes(f"{name}.weight")
            if is_unread(module.weight):
                module.weight = nn.Parameter(stored.values(f"{name}.weight"), requires_grad=False)
        replacement = _replacement(module, codes, kind)
        if replacement is None:
            continue
        if isinstance(replacement, str):
            kept[name] = replacement
            continue
        if isinstance(replacement, PackedLinear):
            kinds[replacement.KIND] += 1
        model.set_submodule(name, replacement)
        del module
        give_back()
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    if next(model.parameters(), None) is None:  # transformers asks the first one for dtype and device
        model.register_parameter("none_left", nn.Parameter(torch.empty(0), requires_grad=False))
    return _words(model, kinds, count), _notes(model, kept)


def _replacement(module: nn.Module, stored: QuantizedTensor | None, kind: str) -> nn.Module | str | None:
    """What stands in for a module; why it stays, if that must be said; None for what is no candidate."""
    if type(module) is nn.Embedding and module.max_norm is None:
        return RoundedEmbedding(module)
    if type(module) is not nn.Linear:
        return None
    if module.in_features % STRIDE:  # torch's product would read past a row's end
        return f"its {module.in_features} inputs are no multiple of {STRIDE}"
    four = stored is not None and stored.bits == 4
    fits = module.in_features % (2 * GROUP) == 0 and module.out_features % STRIDE == 0
    if fits and (kind == "int4" or (not kind and four)):
        made: PackedLinear = Int4Linear.of(module, stored if four else None)
    else:
        made = Int8Linear.of(module)
    reason = _unsound(made)
    return made if reason is None else reason


_checked: dict[tuple[type, int, int], str | None] = {}


def _unsound(made: PackedLinear) -> str | None:
    """Why a layer's two ways do not agree; found out once a shape."""
    key = type(made), made.in_features, made.out_features
    if key not in _checked:
        x = torch.randn(2, made.in_features, generator=torch.Generator().manual_seed(0))
        try:
            want = made.first_rows(_ROWS_AT_ONCE).many(x.to(wide()))
            if not want.isfinite().all():  # damaged weights, which the check at load names
                return None
            got = made.few(x.to(torch.bfloat16)).float()[:, : want.shape[1]]
            apart = float((got - want).abs().max())
            off = not apart <= TOLERANCE * float(want.abs().max())  # also NaN
            _checked[key] = f"torch's packed product is off by {apart:.3g}" if off else None
        except RuntimeError as error:
            _checked[key] = str(error).splitlines()[0]
    return _checked[key]


def has_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def nbytes(model: nn.Module) -> int:
    """Of a model's weights."""
    packed = sum(module.nbytes for module in model.modules() if isinstance(module, PackedLinear))
    tables = sum(module.weight.nbytes for module in model.modules() if isinstance(module, RoundedEmbedding))
    return packed + tables + sum(parameter.nbytes for parameter in model.parameters())


def _words(model: nn.Module, kinds: Counter[str], count: int) -> str:
    if not kinds:
        return "none"
    each = " and ".join(f"{kind} ({number} layers)" for kind, number in kinds.most_common())
    return f"{each}, bfloat16 activations in them: {count / 1e6:.0f}M weights in {nbytes(model) / 1e9:.2f} GB"


def _notes(model: nn.Module, kept: dict[str, str]) -> list[str]:
    notes = []
    if kept:
        name, reason = next(iter(kept.items()))
        notes.append(f"{len(kept)} Linear layers are not packed, such as {name}: {reason}")
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    others = {name: p for name, p in matrices.items() if name.removesuffix(".weight") not in kept}
    if others:
        size = sum(parameter.nbytes for parameter in others.values())
        notes.append(
            f"{len(others)} matrices, such as {next(iter(others))}, are in no Linear layer and stay float32: "
            f"{size / 1e9:.2f} GB"
        )
    return notes
