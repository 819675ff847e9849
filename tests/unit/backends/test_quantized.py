"""K and V in 8 and 4 bits on MLX: the two quantizers against each other, and against what they may lose."""

from __future__ import annotations

from typing import NoReturn

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.host_quantized import HostPool, quantize
from ferrum_mlx.backends.mlx.kernels.check import switch_on
from ferrum_mlx.backends.mlx.layers import LayerKV
from ferrum_mlx.backends.mlx.quantized import QuantizedPool, QuantizedStorage, rounded
from ferrum_mlx.kv.precision import GROUP, head_bytes

mx.set_default_device(mx.cpu)
SLOTS = 40


def rows(head_dim: int, count: int = 300) -> np.ndarray:
    """Heads of very different sizes; among them zeros, and constants of either sign."""
    rng = np.random.default_rng(head_dim)
    made = rng.standard_normal((count, 2, head_dim)) * rng.lognormal(0, 2, (count, 2, 1))
    made[0], made[1], made[2] = 0, 3, -2
    return made.astype(np.float32)


def pools(head_dim: int, bits: int, num_slots: int = SLOTS) -> tuple[HostPool, QuantizedPool]:
    shape = (2, head_dim)
    return HostPool(num_slots, shape, bits), QuantizedPool((num_slots, *shape), mx.float32, bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("head_dim", [10, 32, 64, 80])
def test_both_quantizers_give_the_same_numbers(head_dim: int, bits: int) -> None:
    given = rows(head_dim)
    host, device = pools(head_dim, bits, len(given))
    host[:], device[:] = given, mx.array(given)
    ours, theirs = host[:], np.array(device[:])
    largest = np.abs(given).max(-1, keepdims=True) + 1e-9
    np.testing.assert_allclose(ours / largest, theirs / largest, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(theirs, np.array(rounded(mx.array(given), bits)))
    step = (given.max(-1, keepdims=True).clip(0) - given.min(-1, keepdims=True).clip(None, 0)) / (2**bits - 1)
    assert (np.abs(ours - given) <= step * 1.01 + 1e-6).all()  # of a group that reaches zero
    if bits == 4:  # negative control: half as many bits are told apart
        assert np.abs(ours - given).max() > 4 * np.abs(quantized_in_8(given) - given).max()


def quantized_in_8(given: np.ndarray) -> np.ndarray:
    pool = HostPool(len(given), given.shape[1:], 8)
    pool[:] = given
    return pool[:]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_is_kept_alike_in_any_company_and_at_any_slot(bits: int) -> None:
    given = rows(64, SLOTS)
    host, device = pools(64, bits)
    host[:], device[:] = given, mx.array(given)
    for i in (0, 3, SLOTS - 1):
        for pool, as_array in ((host, np.asarray), (device, np.array)):
            whole = as_array(pool[:])[i]
            slot = np.array([(7 * i) % SLOTS])
            row = given[i : i + 1]
            pool[slot if pool is host else mx.array(slot)] = row if pool is host else mx.array(row)
            np.testing.assert_array_equal(as_array(pool[int(slot[0]) : int(slot[0]) + 1])[0], whole)
            pool[:] = given if pool is host else mx.array(given)


def test_slots_are_read_in_any_order_and_shape() -> None:
    given = rows(32, SLOTS)
    host, device = pools(32, 8)
    host[:], device[:] = given, mx.array(given)
    at = np.array([[5, 2, 9], [1, 1, 0]])
    np.testing.assert_array_equal(np.array(device[mx.array(at)]), np.array(device[:])[at])
    np.testing.assert_array_equal(host[at[0]], host[:][at[0]])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_sizes_are_what_is_allocated(bits: int, dtype: mx.Dtype) -> None:
    layer = LayerKV(None, (2, 64), (3, 80), dtype, bits)
    allocated = [QuantizedPool((SLOTS, *shape), dtype, bits).nbytes for shape in ((2, 64), (3, 80))]
    assert layer.bytes_per_token * SLOTS == sum(allocated)
    if dtype == mx.float32:
        assert [HostPool(SLOTS, shape, bits).nbytes for shape in ((2, 64), (3, 80))] == allocated
    assert head_bytes(64, bits, 2) == 64 * bits // 8 + 2 * 2 * (64 // GROUP)
    assert head_bytes(64, None, 2) == 128


def test_pools_of_keys_alone_hold_no_values() -> None:
    host, device = pools(0, 8)
    host[0:2] = np.zeros((2, 2, 0), np.float32)
    device[0:2] = mx.zeros((2, 2, 0))
    assert (host.nbytes, device.nbytes, device.size) == (0, 0, 0)
    assert host[0:2].shape == (2, 2, 0)


def test_codes_are_whole_numbers_of_their_bits() -> None:
    for bits in (8, 4):
        codes, scales, _ = quantize(rows(64), bits)
        assert codes.dtype == np.uint8
        assert codes.max() == 2**bits - 1
        assert scales.shape == (300, 2, 2)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_metal_kernel_is_off_and_names_the_option(bits: int) -> None:
    def make() -> NoReturn:
        raise AssertionError("no kernel is made for pools that it cannot read")

    storages = [QuantizedStorage(0, SLOTS, (2, 32), (2, 32), mx.float16, bits) for _ in range(3)]
    (reason,) = switch_on(storages, 4, make, lambda: None)
    assert reason == f"it reads K and V in the model's own dtype, not in {bits} bits (--kv-bits {bits})"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_storage_s_parts_are_counted_once_and_its_smallest_copy_is_of_codes(
    dtype: mx.Dtype, bits: int
) -> None:
    storage = QuantizedStorage(0, SLOTS, (2, 64), (3, 80), dtype, bits)
    assert storage.nbytes == sum(array.nbytes for array in storage.arrays())
    assert storage.pool_bytes() == [SLOTS * 2 * 64 * bits // 8, SLOTS * 3 * 96 * bits // 8]
