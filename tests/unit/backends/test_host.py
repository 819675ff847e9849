"""The CPU route against mlx's own operations."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.host_attention import attention
from ferrum_mlx.backends.mlx.host_layers import TILE, HostLinear, matmul, use_host_layers

mx.set_default_device(mx.cpu)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, None), (1, 33, None), (7, 40, None), (9, 30, 5)])
def test_attention_equals_mlx(
    heads: tuple[int, int], sinks: bool, shape: tuple[int, int, int | None]
) -> None:
    rows, length, window = shape
    rng = np.random.default_rng(0)
    n_heads, kv_heads = heads
    q = normal(rng, rows, n_heads, 16)
    k, v = normal(rng, length, kv_heads, 16), normal(rng, length, kv_heads, 24)
    sink = normal(rng, n_heads) if sinks else None
    at = np.arange(length - rows, length)[:, None]
    keys = np.arange(length)[None]
    mask = (keys <= at) & (keys > at - (window or length))
    want = mx.fast.scaled_dot_product_attention(
        mx.array(q).transpose(1, 0, 2)[None],
        mx.array(k).transpose(1, 0, 2)[None],
        mx.array(v).transpose(1, 0, 2)[None],
        scale=0.25,
        mask=mx.array(mask),
        sinks=None if sink is None else mx.array(sink),
    )[0].transpose(1, 0, 2)
    got = attention(q * np.float32(0.25), k, v, ~mask if rows > 1 else None, sink)
    np.testing.assert_allclose(got, np.array(want), atol=2e-6)
    if rows > 1:  # negative control: the mask matters
        unmasked = attention(q * np.float32(0.25), k, v, None, sink)
        assert np.abs(unmasked - np.array(want)).max() > 1e-2


@pytest.mark.parametrize(
    ("n_in", "n_out"), [(576, 576), (576, 192), (576, 1536), (1536, 576), (64, 258), (32, 32)]
)
def test_exact_matmul_gives_a_row_the_same_result_in_any_company(n_in: int, n_out: int) -> None:
    rng = np.random.default_rng(1)
    x, w = normal(rng, 70, n_in), normal(rng, n_out, n_in)
    whole = matmul(x, w, exact=True)
    for rows in (1, 2, 3, TILE - 1, TILE, 13, 32, 64):
        np.testing.assert_array_equal(matmul(x[5 : 5 + rows], w, exact=True), whole[5 : 5 + rows])
    np.testing.assert_allclose(whole, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-3)


def test_linear_and_tied_embedding_share_their_weights_with_mlx() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.Embedding(7, 5))
    x = mx.random.normal((3, 1, 8))
    want = model.layers[0](x)
    tied = model.layers[1].as_linear(want)
    mx.eval(want, tied)
    use_host_layers(model, exact=False)
    assert type(model.layers[0]) is HostLinear
    np.testing.assert_allclose(np.array(model.layers[0](x)), np.array(want), atol=1e-5)
    np.testing.assert_allclose(np.array(model.layers[1].as_linear(want)), np.array(tied), atol=1e-5)
    assert np.shares_memory(model.layers[0].host_weight, np.asarray(model.layers[0].weight))


def test_other_dtypes_keep_mlx_s_own_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 5))
    model.set_dtype(mx.float16)
    use_host_layers(model, exact=False)
    assert type(model.layers[0]) is nn.Linear


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [16, 12])
def test_rope_equals_mlx_at_every_position(traditional: bool, dims: int) -> None:
    rng = np.random.default_rng(2)
    mlx, host = (
        nn.RoPE(dims, traditional, base=100_000.0, scale=0.5),
        nn.RoPE(dims, traditional, 100_000.0, 0.5),
    )
    model = nn.Sequential(host)
    use_host_layers(model, exact=False)
    assert type(host) is not nn.RoPE
    packed = mx.array(normal(rng, 5, 3, 1, 16))  # as in a step: one row a token, positions by row
    positions = mx.array([0, 7, 8191, 3, 100], dtype=mx.int32)
    whole = mx.array(normal(rng, 1, 3, 9, 16))  # as in a dense pass
    for x, offset in ((packed, positions), (whole, 0), (whole, 4000)):
        got, want = np.array(host(x, offset=offset)), np.array(mlx(x, offset=offset))
        np.testing.assert_allclose(got, want, atol=2e-6)
    shifted = np.array(host(packed, offset=positions + 1))  # negative control
    assert np.abs(shifted - np.array(mlx(packed, offset=positions))).max() > 0.1


def test_rms_norm_equals_mlx_and_rounds_a_row_alike_in_any_company() -> None:
    rng = np.random.default_rng(3)
    mlx, host = nn.RMSNorm(96, eps=1e-5), nn.RMSNorm(96, eps=1e-5)
    mlx.weight = host.weight = mx.array(normal(rng, 96))
    use_host_layers(nn.Sequential(host), exact=True)
    x = mx.array(normal(rng, 40, 1, 96) * 30)
    whole = np.array(host(x))
    np.testing.assert_allclose(whole, np.array(mlx(x)), rtol=2e-6, atol=1e-6)
    for row in (0, 7, 39):
        np.testing.assert_array_equal(np.array(host(x[row : row + 1])), whole[row : row + 1])
