"""Steps and tiny models through the Metal kernels, and the check at load.

The kernels run as in test_metal_kernels.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.mlx.kernels.check import difference, switch_on
from ferrum_mlx.backends.mlx.kernels.launch import MAX_ROWS, How, MetalAttention, RowTables
from ferrum_mlx.backends.mlx.kernels.tables import Asked, TableStorage
from ferrum_mlx.backends.mlx.kernels.trial import trial_step, trial_storage
from ferrum_mlx.backends.mlx.pools import PoolStorage
from ferrum_mlx.errors import FerrumError

from ...metal_shim.shim import any_kernel, needs_kernels, on_the_shim
from ...parity import drive

pytestmark = needs_kernels


@pytest.mark.parametrize("window", [None, 40])
def test_steps_of_decodes_verify_segments_and_chunks(window: int | None) -> None:
    """In row order, as gathering gives it, whatever stands between."""
    step, num_slots = trial_step((3, 20, 70, 71, 90), 17, 8, window)
    assert [segment.num_rows for segment in step.segments] == [3, 17, 17, 17, 17]
    with_decodes, _ = trial_step((5, 60), 1, 8, window)
    for each, kinds in ((step, [RowTables, tuple, tuple, tuple, tuple]), (with_decodes, [RowTables])):
        storage = trial_storage(num_slots, (2, 16), (2, 12), mx.float32)
        queries = mx.random.normal((each.num_tokens, 4, 1, 16), key=mx.random.key(5))
        want = storage.attend(each, queries, window, 0.3, None)
        storage.kernel = MetalAttention(any_kernel)
        assert [type(part) for part in storage._parts(each, window)] == kinds
        np.testing.assert_allclose(storage.attend(each, queries, window, 0.3, None), want, atol=2e-5)


def executor(name: str) -> tuple[MLXExecutor, Any]:
    made, config = drive.executor(name, host=False, block_size=8, chunk=20, budget=24)
    made.prepare_startup()
    drive.scatter_blocks(made)
    return made, config


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_models_through_the_kernel_give_mlx_lm_s_ids(name: str) -> None:
    """Full layers, windows and sinks; sequences that come and go, decodes beside chunks and drafts."""
    made, config = executor(name)
    kernel = MetalAttention(any_kernel)
    made.speed_up(lambda: kernel)
    assert made.capabilities().off == ()
    assert made.capabilities().max_verify_rows == MAX_ROWS
    answers = drive.reference_ids(name)
    found = drive.run_engine(made, config, answers=answers)
    assert found.outputs == answers
    assert found.mixed_steps > 0
    assert found.accepted > 0
    assert found.drafted > found.accepted


class Wrong(MetalAttention):
    """Blocks in the wrong order."""

    def __call__(self, *given: Any) -> mx.array:
        *others, tables, how = given
        lists = tables.entries[4 * tables.sequences :]
        entries = mx.concatenate([tables.entries[: 4 * tables.sequences], mx.roll(lists, 1)])
        return super().__call__(*others, replace(tables, entries=entries), how)


def test_with_wrong_blocks_they_do_not() -> None:
    made, config = executor("llama")
    for storage in made._packed.storages:
        assert isinstance(storage, TableStorage)
        storage.kernel = Wrong(any_kernel)
    assert drive.run_engine(made, config).outputs != drive.reference_ids("llama")


# The check at load


def asked(dim: int = 16, **how: Any) -> TableStorage:
    storage = TableStorage(0, 64, (2, dim), (2, dim), mx.float32)
    storage.asked = Asked(4, mx.float32, How(**{"scale": 0.25, "window": None, "sinks": None, **how}))
    return storage


def passes() -> None:
    pass


def test_the_check_takes_the_kernel_and_refuses_a_wrong_one() -> None:
    kernel = MetalAttention(any_kernel)
    assert difference(kernel, asked(window=20, sinks=mx.zeros(4)), 8) is None
    reason = difference(Wrong(any_kernel), asked(), 8)
    assert reason is not None
    assert "1 rows over up to 83 keys are off by" in reason

    class WithoutWindow(MetalAttention):
        def __call__(self, *given: Any) -> mx.array:
            return super().__call__(*given[:-1], replace(given[-1], window=None))

    assert "off by" in str(difference(WithoutWindow(any_kernel), asked(window=20), 8))

    class OnlyDecodes(MetalAttention):
        def __call__(self, *given: Any) -> mx.array:
            return super().__call__(*given) * (given[3].most == 1)

    assert str(difference(OnlyDecodes(any_kernel), asked(), 8)).startswith("16 rows over up to 83 keys")


def test_the_kernel_is_on_in_the_layers_that_it_serves_and_off_in_others_with_the_reason() -> None:
    good, wide, never = asked(), asked(dim=300), TableStorage(0, 64, (2, 16), (2, 16), mx.float32)
    half = asked()
    half.asked = Asked(4, mx.float16, half.asked.how)  # type: ignore[union-attr]
    plain = PoolStorage(0, 64, (2, 16), (2, 16), mx.float32)
    kernel = MetalAttention(any_kernel)
    reasons = switch_on([good, wide, never, half, plain, asked(), asked()], 8, lambda: kernel, passes)
    assert reasons == [
        "1 of 7 layers keep keys and values in a form of their own",
        "1 of 7 layers compute with keys and values themselves",
        "1 of 7 layers: heads of 300 and 300 elements; supported: 1 to 256",
        "1 of 7 layers: queries in mlx.core.float16 over keys in mlx.core.float32",
    ]
    assert [s.kernel for s in (good, wide, never, half)] == [kernel, None, None, None]


def test_a_kernel_that_cannot_be_made_or_run_or_changes_the_model_is_off_with_the_reason() -> None:
    def impossible() -> MetalAttention:
        raise RuntimeError("no such compiler")

    storage = asked()
    assert switch_on([storage], 8, impossible, passes) == [
        "it does not run on this device: RuntimeError: no such compiler"
    ]

    def broken(**fields: Any) -> Any:
        def launch(**how: Any) -> Any:
            raise ValueError("threadgroup too large")

        return launch

    (reason,) = switch_on([storage], 8, lambda: MetalAttention(broken), passes)
    assert reason == "1 of 1 layers: it does not run on this device: ValueError: threadgroup too large"
    assert storage.kernel is None

    def differs() -> None:
        raise FerrumError("the model is not exact")

    (reason,) = switch_on([storage], 8, lambda: MetalAttention(any_kernel), differs)
    assert reason == "through it, the model is not exact"
    assert storage.kernel is None


@on_the_shim
def test_without_metal_nothing_is_tried() -> None:
    made, _ = executor("llama")
    assert made.capabilities().off == ()
    assert all(storage.kernel is None for storage in made._packed.storages)  # type: ignore[attr-defined]
    made.speed_up(MetalAttention)
    (reason,) = made.capabilities().off
    assert reason.startswith("paged kernel: ")
    assert "No Metal back-end" in reason
