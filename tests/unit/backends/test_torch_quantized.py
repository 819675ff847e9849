"""K and V in 8 bits on torch: what they may lose, and what is refused or off because of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import torch

from ferrum_mlx.backends.torch.layers import LayerKV
from ferrum_mlx.backends.torch.quantized import QuantizedPool, dequantize, quantize, rounded
from ferrum_mlx.backends.torch.tables import attend
from ferrum_mlx.errors import UsageError

from ...contract.conftest import BACKENDS, tiny_config
from ...contract.tape import TapeCapture

CPU = torch.device("cpu")


def rows(head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    made = torch.randn(300, 2, head_dim, generator=generator) * 10 ** torch.randn(
        300, 2, 1, generator=generator
    )
    made[0], made[1], made[2] = 0, 3, -2
    return made.to(dtype)


@pytest.mark.parametrize("head_dim", [10, 32, 64, 80])
def test_no_number_moves_by_more_than_half_a_step(head_dim: int) -> None:
    given = rows(head_dim)
    low, high = given.amin(-1, keepdim=True).clamp(max=0), given.amax(-1, keepdim=True).clamp(min=0)
    apart = (rounded(given) - given).abs()
    assert bool((apart <= (high - low) / 255 * 0.51 + 1e-6).all())
    assert float((apart / (high - low + 1e-9)).max()) > 1e-4  # something is rounded at all


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 5e-3), (torch.bfloat16, 1.2e-2)])
def test_sixteen_bits_round_by_half_a_step_and_their_own_precision(dtype: torch.dtype, share: float) -> None:
    given = rows(64, dtype)
    apart = (rounded(given).float() - given.float()).abs().amax(-1)
    assert bool((apart <= share * given.float().abs().amax(-1) + 1e-6).all())


def test_scales_that_are_mixed_up_are_noticed() -> None:
    """Negative control of the bound above."""
    given = rows(64)
    codes, scales, biases = quantize(given)
    apart = (dequantize(codes, scales.roll(1, 0), biases, 64) - given).abs()
    assert float((apart / given.abs().amax(-1, keepdim=True).clamp(min=1e-6)).max()) > 0.5


def test_a_token_is_kept_alike_in_any_company() -> None:
    given = rows(64)
    whole, pool = rounded(given), QuantizedPool((8, 2, 64), torch.float32, CPU)
    for i in (0, 5, 299):
        pool.index_copy_(0, torch.tensor([3]), given[i : i + 1])
        assert torch.equal(pool[3:4][0], whole[i])
        assert torch.equal(pool.index_select(0, torch.tensor([3, 3]))[1], whole[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes_are_what_is_allocated(dtype: torch.dtype) -> None:
    layer = LayerKV(None, (2, 64), (3, 80), dtype, 8)
    allocated = [QuantizedPool((40, *shape), dtype, CPU).nbytes for shape in ((2, 64), (3, 80))]
    assert layer.bytes_per_token * 40 == sum(allocated)


def test_four_bits_are_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"--kv-bits is 4; allowed on torch: 8; .*--backend mlx"):
        BACKENDS["torch"](tiny_config(kv_bits=4), 40)


def test_the_kernel_and_captured_steps_are_off_and_say_why() -> None:
    executor = BACKENDS["torch"](tiny_config(kv_bits=8), 40)
    executor.prepare_startup()
    kernel = "paged kernel: it reads K and V in the model's own dtype, not in 8 bits (--kv-bits 8)"
    assert executor.capabilities().off == (kernel,)  # the CPU's
    executor.speed_up(lambda: attend, TapeCapture())  # type: ignore[attr-defined]
    assert executor.capabilities().off == (
        kernel,
        "captured decode steps: they need the paged kernel, which is off",
    )
