"""The Triton kernel against its plain form, and that against a loop over rows.

Where there is no NVIDIA GPU the kernel runs in Triton's interpreter (tests/conftest.py), which cannot
multiply bfloat16: there float32 and float16 stand for it. What the interpreter would take and the compiler
would not, a test compiles.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch

from ferrum_mlx.backends.torch.layers import LayerKV
from ferrum_mlx.backends.torch.paged_check import difference
from ferrum_mlx.backends.torch.paged_kernel import TritonAttention
from ferrum_mlx.backends.torch.tables import How, TableStorage, attend

from .paged_cases import DEVICE, by_rows, ids_through, make_case, outcome


@pytest.mark.parametrize("seed", range(8))
def test_the_plain_form_is_attention_row_by_row(seed: int) -> None:
    case = make_case(seed)
    torch.testing.assert_close(outcome(attend, case), outcome(by_rows, case), atol=2e-5, rtol=0)


@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_is_its_plain_form(seed: int) -> None:
    case = make_case(100 + seed)
    programs = random.Random(seed).choice([1, 8, 64, 500])  # how far keys are split
    got = outcome(TritonAttention(programs), case)
    torch.testing.assert_close(got, outcome(attend, case), atol=2e-5, rtol=0)
    assert (got[-1] == 7).all()  # a row of nobody's


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_in_float16(seed: int) -> None:
    given, how = case = make_case(200 + seed, torch.float16)
    wide = {name: given[name].float() for name in ("queries", "keys", "values")}
    want = given["out"].float()
    attend(**{**given, **wide, "out": want}, how=how)
    torch.testing.assert_close(outcome(TritonAttention(64), case), want, atol=5e-3, rtol=0)


def test_the_comparison_sees_a_wrong_block_a_wrong_length_and_a_wrong_window() -> None:
    given, how = case = make_case(103)
    tables, want = given["tables"], outcome(attend, make_case(103))
    swapped = replace(tables, blocks=tables.blocks.roll(1))
    shorter = replace(tables, contexts=tables.contexts - 1)
    for wrong in (swapped, shorter):
        assert (outcome(TritonAttention(64), case, tables=wrong) - want).abs().max() > 1e-2
    narrow = outcome(TritonAttention(64), case, how=replace(how, window=3))
    assert (narrow - want).abs().max() > 1e-2


def storage(**fields: Any) -> TableStorage:
    made = TableStorage(0, 32, LayerKV(fields.get("window"), (2, 16), (2, 16), torch.float32), DEVICE)
    made.asked = 4, How(0.25, fields.get("window"), fields.get("softcap"), fields.get("sinks"))
    return made


def test_the_check_at_load_takes_the_kernel_and_refuses_a_wrong_one() -> None:
    contexts = (1, 16, 83, 0)  # the interpreter is slow
    sinks = torch.zeros(4, device=DEVICE)
    assert difference(TritonAttention(64), storage(), contexts) is None
    bent = storage(window=40, softcap=5.0, sinks=sinks)
    assert difference(TritonAttention(64), bent, contexts) is None

    def without_window(*given: Any) -> None:
        attend(*given[:-1], replace(given[-1], window=None))

    reason = difference(without_window, storage(window=40))
    assert reason is not None
    assert reason.startswith("1 rows a sequence of torch.float32 are off by ")

    def one_row_only(*given: Any) -> None:
        if given[3].max_rows == 1:
            attend(*given)
        else:
            given[4].zero_()

    reason = difference(one_row_only, storage())
    assert reason is not None
    assert reason.startswith("16 rows a sequence")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_models_through_the_kernel_give_their_own_ids(name: str) -> None:
    """Full, windowed, capped and sinking layers."""
    got, wanted = ids_through(TritonAttention(16), name)
    assert got == wanted


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ferrum_mlx.backends.torch import paged_kernel as kernels

def compile(function, types, capability, **constants):
    names = [name for name in function.arg_names if name not in constants]
    assert len(names) == len(types.split()), names
    signature = dict(zip(names, types.split())) | {name: "constexpr" for name in constants}
    aligned = {(function.arg_names.index(name),): [["tt.divisibility", 16]]
               for name in names if signature[name] != "fp32"}
    source = ASTSource(function, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})
    assert made.metadata.shared <= 48 * 1024, made.metadata.shared
    assert made.asm["cubin"]

SIZES = {"MAX_ROWS": 16, "TILE_N": 64, "DV": 128, "DV_PAD": 128}
PLAIN, ALL = {"WINDOW": 0, "SINKS": False}, {"WINDOW": 100, "SINKS": True}
TILES = {"BLOCK_SIZE": 16, "GROUP": 4, "ROWS": 4, "TILES": 4, "TILE_M": 16, "DK": 128, "DK_PAD": 128}
POOLS, TABLES, STRIDES = "*bf16 " * 3, "*i64 " * 5, "i32 " * 8
for capability, splits, out, softcap, kind in ((80, 1, "*bf16 ", 30.0, ALL), (90, 16, "*fp32 ", 0.0, PLAIN)):
    compile(kernels._attend, POOLS + out + "*fp32 *fp32 *bf16 " + TABLES + "fp32 " + STRIDES, capability,
            SPLITS=splits, SOFTCAP=softcap, **SIZES, **TILES, **kind)
merged = "*fp32 *fp32 *fp32 *bf16 *bf16 *i64 *i64 *i64 i32 i32"
compile(kernels._merge, merged, 80, SPLITS=64, **SIZES, **ALL)
print("compiled")
"""


def test_the_kernels_compile_for_cuda_without_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert done.stdout == "compiled\n", done.stderr
