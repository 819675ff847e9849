"""Packed layers against an independent unpacking in numpy, in both of their ways; what cannot be packed."""

from __future__ import annotations

import copy

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import torch
from torch import nn

from ferrum_mlx.backends.torch import weights
from ferrum_mlx.backends.torch.weights import GROUP, Int4Linear, Int8Linear, PackedLinear, RoundedEmbedding
from ferrum_mlx.gguf import QuantizedTensor

OUT, IN = 128, 192
ROWS = (1, 3, 200)  # few, few, many
ROUNDING = 2e-2  # bfloat16: 8 bits of each input and of the output


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(IN, OUT, bias=bias)


def file_codes() -> QuantizedTensor:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (OUT, IN), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (OUT, IN // GROUP)).astype(np.float16)
    return QuantizedTensor(codes, scales, rng.normal(0, 0.3, scales.shape).astype(np.float32), 4)


class Stored:
    """A file with the codes of one layer and the values of others."""

    def __init__(self, codes: QuantizedTensor | None = None, **values: torch.Tensor) -> None:
        self._codes, self._values = codes, values

    def codes(self, name: str) -> QuantizedTensor | None:
        return self._codes if name == "second.weight" else None

    def values(self, name: str) -> torch.Tensor:
        return self._values[name.removesuffix(".weight")]


def unpacked(stored: QuantizedTensor) -> np.ndarray:
    """code · scale + bias, one scale and bias for each group of a row."""
    scales = np.repeat(stored.scales.astype(np.float64), GROUP, axis=1)
    return stored.codes * scales + np.repeat(stored.biases.astype(np.float64), GROUP, axis=1)


def differs(layer: PackedLinear, weight: np.ndarray, rows: int) -> float:
    """Largest difference to the product in float64, as a share of the largest value."""
    x = torch.randn(1, rows, IN, generator=torch.Generator().manual_seed(rows))
    want = x.double().numpy() @ weight.T
    got = layer(x)
    assert got.dtype == torch.float32
    return float(np.abs(got.double().numpy() - want).max() / np.abs(want).max())


@pytest.mark.parametrize("rows", ROWS)
def test_four_bits_of_a_file_are_its_own_numbers(rows: int) -> None:
    stored = file_codes()
    assert differs(Int4Linear.of(linear(), stored), unpacked(stored), rows) < ROUNDING


@pytest.mark.parametrize("rows", ROWS)
def test_eight_bits_are_near_the_weights(rows: int) -> None:
    whole = linear()
    assert differs(Int8Linear.of(whole), whole.weight.detach().double().numpy(), rows) < ROUNDING


@pytest.mark.parametrize("rows", ROWS)
def test_a_wrong_scale_is_seen(rows: int) -> None:
    stored = file_codes()
    layer = Int4Linear.of(linear(), stored)
    layer.scales[2, 5, 0] *= 3  # one group of one row
    assert differs(layer, unpacked(stored), rows) > 2 * ROUNDING
    whole = linear()
    eight = Int8Linear.of(whole)
    eight.scales[5] *= 5
    assert differs(eight, whole.weight.detach().double().numpy(), rows) > 2 * ROUNDING


def test_four_bits_made_here_are_the_nearest() -> None:
    """No code one up or down would be nearer."""
    whole = linear()
    layer = Int4Linear.of(whole)
    weight = whole.weight.detach().double()
    scales, zeros = (a.repeat_interleave(GROUP, 1) for a in layer.scales.double().permute(2, 1, 0))
    codes = torch.cat([layer.halves & 15, layer.halves >> 4], dim=1).double()
    value = (codes - 8) * scales + zeros
    inside = (codes > 0) & (codes < 15)
    assert ((value - weight).abs() <= scales * 0.51)[inside].all()


@pytest.mark.parametrize("make", [Int8Linear.of, Int4Linear.of])
def test_biases_shapes_and_no_rows(make: type[PackedLinear]) -> None:
    whole = linear(bias=True)
    layer = make(whole)
    plain = make(nn.Linear(IN, OUT, bias=False))
    plain.__dict__.update({name: layer.__dict__[name] for name in layer.ROWS})
    x = torch.randn(2, 3, IN)
    assert torch.equal(layer(x), plain(x) + whole.bias)
    assert layer(x[:, :0]).shape == (2, 0, OUT)
    assert torch.allclose(layer.weight, whole.weight, atol=0.02)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("rows", ROWS)
def test_layers_joined_are_those_layers(kind: str, rows: int) -> None:
    make = Int8Linear.of if kind == "int8" else Int4Linear.of
    layers = [make(nn.Linear(IN, out, bias=False)) for out in (128, 64, 64)]
    x = torch.randn(rows, IN)
    apart = [layer(x) for layer in layers]
    whole = type(layers[0]).joined(layers)
    assert whole is not None
    assert whole is type(layers[0]).joined(layers)
    torch.testing.assert_close(whole(x), torch.cat(apart, dim=-1), rtol=1e-2, atol=1e-2)
    for layer, before in zip(layers, apart, strict=True):
        torch.testing.assert_close(layer(x), before, rtol=1e-2, atol=1e-2)
    parts = [getattr(layer, name) for layer in layers for name in layer.ROWS]
    owned = {getattr(whole, name).untyped_storage().data_ptr() for name in whole.ROWS}
    assert {part.untyped_storage().data_ptr() for part in parts} == owned  # nothing is held twice


def test_rows_that_are_packed_together_are_not_cut() -> None:
    layers = [Int4Linear.of(nn.Linear(IN, out, bias=False)) for out in (32, 96)]
    assert Int4Linear.joined(layers) is None


class Model(nn.Module):
    def __init__(self, inputs: int = IN) -> None:
        super().__init__()
        self.table = nn.Embedding(10, IN)
        self.first, self.second = nn.Linear(IN, inputs), nn.Linear(inputs, OUT)
        self.experts = nn.Parameter(torch.zeros(2, 8, 8))


def test_a_model_keeps_what_cannot_be_packed_and_says_so() -> None:
    model = Model(inputs=40)
    words, notes = weights.pack(model)
    assert words.startswith("int8 per channel (1 layers), bfloat16 activations in them: 0M weights in")
    assert notes == [
        "1 Linear layers are not packed, such as second: its 40 inputs are no multiple of 16",
        "1 matrices, such as experts, are in no Linear layer and stay float32: 0.00 GB",
    ]
    assert isinstance(model.first, Int8Linear)
    assert type(model.second) is nn.Linear


def test_a_product_that_is_wrong_here_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_checked", {})
    monkeypatch.setattr(Int8Linear, "few", lambda self, x: (x @ self.codes.T.to(x.dtype)) * self.scales * 1.2)
    words, notes = weights.pack(Model())
    assert words == "none"
    assert "2 Linear layers are not packed, such as first: torch's packed product is off by" in notes[0]


def test_each_layer_is_packed_as_it_is_stored() -> None:
    model, stored = Model(), file_codes()
    words, _ = weights.pack(model, Stored(stored))
    assert isinstance(model.first, Int8Linear)
    assert isinstance(model.second, Int4Linear)
    assert "int4 in groups of 32 (1 layers)" in words
    assert "int8 per channel (1 layers)" in words
    for kind, cls in (("int8", Int8Linear), ("int4", Int4Linear)):
        model = Model()
        weights.pack(model, Stored(stored), kind)
        assert type(model.first) is type(model.second) is cls


def test_a_layer_that_is_not_read_yet_is_read_when_it_is_packed() -> None:
    model, unread = Model(inputs=40), Model(inputs=40)
    unread.load_state_dict(model.state_dict())
    for layer in (unread.first, unread.second):
        layer.weight = nn.Parameter(weights.placeholder(tuple(layer.weight.shape)))
        assert layer.weight.untyped_storage().nbytes() == 4
    weights.pack(model)
    weights.pack(unread, Stored(first=linear_weight(40, IN), second=linear_weight(OUT, 40)))
    assert torch.equal(unread.second.weight, linear_weight(OUT, 40))  # 40 inputs cannot be packed
    want = Model(inputs=40)
    want.first.weight.data = linear_weight(40, IN)
    weights.pack(want)
    assert torch.equal(unread.first.codes, want.first.codes)
    assert not torch.equal(unread.first.codes, model.first.codes)


def linear_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def test_a_table_keeps_sixteen_bits() -> None:
    model = Model()
    rows = model.table.weight[[3, 4]].detach()
    weights.pack(model)
    assert isinstance(model.table, RoundedEmbedding)
    got = model.table(torch.tensor([3, 4]))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, rows, rtol=1e-3, atol=1e-6)


def test_all_bytes_are_counted_and_copies_share_them() -> None:
    model = Model()
    weights.pack(model)
    first, second = IN * IN + 2 * IN + 4 * IN, OUT * IN + 2 * OUT + 4 * OUT
    assert weights.nbytes(model) == first + second + 10 * IN * 2 + 2 * 8 * 8 * 4
    assert copy.deepcopy(model).first is model.first
