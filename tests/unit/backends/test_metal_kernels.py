"""The Metal kernels against numpy.

On a Mac MLX runs them on the GPU; elsewhere g++ compiles the same source for the CPU (tests/metal_shim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.mlx.kernels import launch, source
from ferrum_mlx.backends.mlx.kernels.launch import MetalAttention
from ferrum_mlx.backends.mlx.kernels.tables import row_tables
from ferrum_mlx.backends.mlx.kernels.trial import trial_step

from ...metal_shim.attention import Case, Kind, by_rows, make_case
from ...metal_shim.shim import METAL, Kernel, ShimError, needs_kernels, on_the_shim

pytestmark = needs_kernels
MAKE: Callable[..., Any] = mx.fast.metal_kernel if METAL else Kernel
# Metal's fast::exp is right to some twenty units in the last place.
TOLERANCE = {mx.float32: 1e-4 if METAL else 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}

KINDS = {
    "one key, a block, some": Kind((1, 5, 16, 17, 250), (1,) * 5),
    "split": Kind((3000, 1, 700), (1,) * 3, group=3),
    "split verify rows": Kind((600, 9, 30), (9, 9, 1), kv_heads=1, group=4, dim=128, block_size=32),
    "float16, two tiles": Kind((70, 33), (1, 1), mx.float16, kv_heads=1, group=8, dim=128, block_size=32),
    "float16, split": Kind((600,), (1,), mx.float16, kv_heads=1, group=4, dim=128),
    "256, split": Kind((40, 700), (2, 1), kv_heads=1, group=3, dim=256),
    "bfloat16, 80, window, sinks": Kind(
        (100, 41, 40, 3), (3, 2, 5, 3), mx.bfloat16, dim=80, window=40, sinks=True
    ),
    "window and sinks, split": Kind((900, 300), (1, 1), group=2, window=600, sinks=True),
    "softcap, window": Kind((90, 20), (16, 4), group=7, window=9, softcap=1.5),
    "softcap and sinks, split": Kind((520,), (1,), group=2, softcap=1.5, sinks=True),
    "96 over 64": Kind((50, 7), (1, 1), group=2, dim=96, value_dim=64),
    "20 over 12, blocks of 13": Kind(
        (60, 14), (6, 1), kv_heads=3, group=2, dim=20, value_dim=12, block_size=13
    ),
}


def outcome(case: Case, make: Callable[..., Any] = MAKE, **changed: Any) -> np.ndarray:
    given = {"tables": case.tables(), "how": case.how, **changed}
    out = MetalAttention(make)(case.queries, case.keys, case.values, given["tables"], given["how"])
    assert out.dtype == case.kind.dtype
    return np.array(out.astype(mx.float32))


def apart(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max())


@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_is_attention_row_by_row(name: str) -> None:
    case = make_case(KINDS[name])
    got = outcome(case)
    assert got.shape == (*case.queries.shape[:2], case.values.shape[2])
    np.testing.assert_allclose(got, by_rows(case), atol=TOLERANCE[case.kind.dtype], rtol=0)


def test_the_cases_take_every_way_through_the_kernels() -> None:
    splits, tiles = {}, {}
    for name, kind in KINDS.items():
        dim = max(kind.dim, kind.value_dim or kind.dim)
        _, tiles[name] = launch._tiling(kind.group, max(kind.rows), dim)
        tables = make_case(kind).tables()
        splits[name] = launch._splits(tiles[name] * kind.kv_heads * tables.sequences, tables.span)
    assert {name for name, count in splits.items() if count > 1} == {
        name for name in KINDS if "split" in name
    }
    assert max(splits.values()) == 11
    assert tiles["float16, two tiles"] == 2
    assert tiles["softcap, window"] == 14


def test_the_comparison_sees_a_wrong_block_a_wrong_length_and_a_wrong_window() -> None:
    case = make_case(replace(KINDS["one key, a block, some"], contexts=(100, 60), rows=(1, 1), window=40))
    want, tables = by_rows(case), case.tables()
    assert apart(outcome(case), want) < TOLERANCE[mx.float32]
    for window in (39, 41):
        assert not apart(outcome(case, how=replace(case.how, window=window)), want) < 1e-2  # NaN, too
    swapped = mx.concatenate([tables.entries[:8], tables.entries[8:][::-1]])
    assert not apart(outcome(case, tables=replace(tables, entries=swapped)), want) < 1e-2
    shorter = tables.entries - mx.array([0, 0, 1, 0] * 2 + [0] * (tables.entries.size - 8))
    assert not apart(outcome(case, tables=replace(tables, entries=shorter)), want) < 1e-2


# What the shim finds


def changed(old: str, new: str) -> Callable[..., Any]:
    """The kernels with a fault of that kind."""
    assert old in source.ATTEND.body + source.MERGE.body

    def make(**fields: Any) -> Kernel:
        return Kernel(**{**fields, "source": fields["source"].replace(old, new)})

    return make


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@on_the_shim
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (f"  {BARRIER}\n  const int v", "  const int v", "out depends on which simdgroup is first"),
        (f"  {BARRIER}  // before", "  // before", "out depends on which simdgroup is first"),
        (BARRIER, f"if (sg > 0) {BARRIER}", "one thread is at the end, another at a barrier"),
        ("s = simd_sum(s);", "if (lane > 3) s = simd_sum(s);", "in a simdgroup: one thread is at"),
        ("out[at * DV + d]", "out[at * DV + d - 1]", "writes before out"),
        ("out[at * DV + d]", "out[at * DV + d + 1]", "writes behind out"),
        ("sum += factor[g]", "sum += 1.0 * factor[g]", "double-promotion"),
    ],
)
def test_the_shim_finds_faults_of_the_kernels(old: str, new: str, found: str) -> None:
    case = make_case(Kind((40,), (2,), kv_heads=1, group=2))
    with pytest.raises(ShimError, match=found):
        outcome(case, changed(old, new))


@on_the_shim
def test_what_is_read_beside_an_array_or_not_written_is_nan() -> None:
    case = make_case(Kind((39,), (1,), kv_heads=1))
    assert np.isnan(outcome(case, changed("min(t + j, end - 1)", "t + j"))).any()
    assert np.isnan(outcome(case, changed("d < DV; d += 32 * SIMDS", "d < DV - 1; d += 32 * SIMDS"))).any()


# What MLX needs to know


def test_the_sources_are_short_and_ask_for_few_buffers() -> None:
    for kernel in (source.ATTEND, source.MERGE):
        assert len(kernel.body) < 10_000  # MLX hashes it at each launch
        shapes = sum(f"{name}_shape" in kernel.body for name in kernel.inputs)
        assert len(kernel.inputs) + len(kernel.outputs) + shapes <= 31


def test_tables_of_one_short_sequence_are_long_enough_for_device_memory() -> None:
    step, _ = trial_step((1,), 1, 16, None)
    tables = row_tables(step, step.segments, 0, None)
    assert tables.entries.tolist() == [0, 1, 1, 4, 1, 0, 0, 0]
    assert (tables.start, tables.end, tables.sequences, tables.most, tables.span) == (0, 1, 1, 1, 1)
