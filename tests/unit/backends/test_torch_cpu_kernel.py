"""The CPU's kernel against attention row by row: what it reads, what it must not, and its company."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")
pytest.importorskip("numba", reason="numba is not installed: pip install 'ferrum-mlx[cpu]'")

import builtins
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ferrum_mlx.backends.torch import cpu_kernel, layers, paged_check, weights, zoo
from ferrum_mlx.backends.torch import device as devices
from ferrum_mlx.backends.torch import executor as executor_module
from ferrum_mlx.backends.torch.build import Loaded
from ferrum_mlx.backends.torch.cpu_attention import CPUAttention, team
from ferrum_mlx.backends.torch.device import without_cpu_kernel
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.layers import LayerKV
from ferrum_mlx.backends.torch.paged_check import difference
from ferrum_mlx.backends.torch.tables import How, TableStorage, attend
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError

from .paged_cases import Case, by_rows, ids_through, make_case, outcome

if torch.cuda.is_available():
    pytest.skip("the cases are made on the GPU here", allow_module_level=True)

ALONE, TEAM = CPUAttention(team(1)), CPUAttention(team(2))


def by_head(pool: torch.Tensor) -> torch.Tensor:
    """As pools lie on a CPU."""
    return pool.transpose(0, 1).contiguous().transpose(0, 1)


def case_of(seed: int, kept: torch.dtype = torch.float32) -> Case:
    given, how = make_case(seed, groups=(3,), dims=(16,), value_dims=())
    pools = {name: by_head(given[name].to(kept)) for name in ("keys", "values")}
    return {**given, **pools}, how


@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_is_attention_row_by_row(seed: int, kept: torch.dtype) -> None:
    case = case_of(seed, kept)
    got = outcome(TEAM, case)
    torch.testing.assert_close(got, outcome(by_rows, case), atol=1e-5, rtol=0)
    assert (got[-1] == 7).all()  # a row of nobody's


def test_values_may_be_of_another_size() -> None:
    given, how = make_case(4, groups=(1,), dims=(8,), value_dims=(20,) * 9)
    given |= {name: by_head(given[name]) for name in ("keys", "values")}
    assert given["values"].shape[2] == 20
    torch.testing.assert_close(outcome(TEAM, (given, how)), outcome(by_rows, (given, how)), atol=1e-5, rtol=0)


def test_the_comparison_sees_a_wrong_block_a_wrong_length_and_a_wrong_window() -> None:
    given, how = case = case_of(0)
    tables, want = given["tables"], outcome(by_rows, case)
    swapped = replace(tables, blocks=tables.blocks.roll(1), made={})
    shorter = replace(tables, contexts=tables.contexts - 1, made={})
    for wrong in (swapped, shorter):
        assert (outcome(TEAM, case, tables=wrong) - want).abs().max() > 1e-2
    assert (outcome(TEAM, case, how=replace(how, window=3)) - want).abs().max() > 1e-2


def many() -> Case:
    """Three long sequences of three rows each, in pieces that several threads take."""
    given, _ = case_of(0)
    tables = given["tables"]
    contexts, size = torch.tensor([1300, 700, 515]), 16
    lengths = [-(-int(context) // size) for context in contexts]
    noise = torch.Generator().manual_seed(1)
    blocks = 1 + torch.randperm(sum(lengths), generator=noise)
    keys, values = (
        by_head(torch.randn((len(blocks) + 1) * size, 2, 16, generator=noise).half()) for _ in range(2)
    )
    tables = replace(
        tables,
        starts=torch.tensor([0, 3, 6]),
        counts=torch.tensor([3, 3, 3]),
        contexts=contexts,
        firsts=torch.tensor([0, lengths[0], lengths[0] + lengths[1]]),
        blocks=blocks,
        max_rows=16,
        width=max(lengths),
        block_size=size,
        made={},
    )
    queries = torch.randn(9, 6, 16, generator=noise)
    out = torch.zeros(9, 6, 16)
    return {"queries": queries, "keys": keys, "values": values, "tables": tables, "out": out}, How(
        0.25, None, None, None
    )


def test_threads_and_company_do_not_change_a_bit() -> None:
    case = many()
    given, want = case[0], outcome(TEAM, case)
    torch.testing.assert_close(want, outcome(by_rows, case), atol=1e-5, rtol=0)
    for _ in range(5):  # whoever takes which piece
        assert torch.equal(outcome(TEAM, case), want)
    assert torch.equal(outcome(ALONE, case), want)
    tables = given["tables"]
    for row in range(9):  # as a decode row, with nobody beside it
        sequence, later = row // 3, 2 - row % 3
        alone = replace(
            tables,
            starts=torch.tensor([row]),
            counts=torch.tensor([1]),
            contexts=tables.contexts[sequence : sequence + 1] - later,
            firsts=tables.firsts[sequence : sequence + 1].clone(),
            made={},
        )
        assert torch.equal(outcome(TEAM, case, tables=alone)[row], want[row])


def test_what_nobody_wrote_is_not_read_and_what_is_no_number_shows() -> None:
    case = many()
    given, want = case[0], outcome(TEAM, case)
    tables = given["tables"]
    last = int(tables.blocks[tables.firsts[1] - 1]) * 16  # of 1,300 tokens the last block has 4
    for name in ("keys", "values"):
        given[name][last + 4 : last + 16] = torch.nan
    assert torch.equal(outcome(TEAM, case), want)
    for name in ("keys", "values"):
        kept = given[name][last + 3].clone()
        given[name][last + 3] = torch.nan  # seen by the third row alone
        got = outcome(TEAM, case)
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])
        given[name][last + 3] = kept


def storage(kept: torch.dtype | None = None, dtype: torch.dtype = torch.float32) -> TableStorage:
    layer = LayerKV(None, (2, 16), (2, 16), dtype, kept=kept)
    made = TableStorage(0, 32, layer, torch.device("cpu"))
    made.asked = 6, How(0.25, None, None, None)
    return made


@pytest.mark.parametrize("kept", [None, torch.float16])
def test_the_check_at_load_takes_the_kernel_and_refuses_a_wrong_one(kept: torch.dtype | None) -> None:
    assert difference(TEAM, storage(kept)) is None

    def off_by_one(*given: Any) -> None:
        attend(
            *given[:3], replace(given[3], contexts=given[3].contexts.clamp(min=2) - 1, made={}), *given[4:]
        )

    reason = difference(off_by_one, storage())
    assert reason is not None
    assert "are off by" in reason


def test_what_would_be_read_wrongly_is_refused() -> None:
    given, how = case_of(0)
    with pytest.raises(ValueError, match=r"queries are torch\.bfloat16"):
        outcome(TEAM, ({**given, "queries": given["queries"].bfloat16()}, how))
    with pytest.raises(ValueError, match=r"a pool is torch\.bfloat16"):
        outcome(TEAM, ({**given, "keys": given["keys"].bfloat16()}, how))
    with pytest.raises(ValueError, match="do not lie one behind the other"):
        outcome(TEAM, ({**given, "keys": given["keys"].contiguous()}, how))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_models_through_the_kernel_give_their_own_ids(name: str) -> None:
    """Full, windowed, capped and sinking layers."""
    got, wanted = ids_through(TEAM, name)
    assert got == wanted


def test_a_load_switches_it_on_and_tells_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(**settings: Any) -> str:
        config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=2, **settings)
        executor = TorchExecutor(zoo.build("llama"), zoo.info("llama"), config, free_memory=2**24)
        executor.prepare_startup()
        return "; ".join(executor.capabilities().off)

    assert "paged kernel" not in off()
    assert "not in 8 bits" in off(kv_bits=8)
    monkeypatch.setattr(paged_check, "without_cpu_kernel", lambda: "numba is not installed")
    assert "paged kernel: numba is not installed" in off()


def test_a_broken_numba_is_told_and_gives_no_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, *rest: Any) -> Any:
        if name == "ferrum_mlx.backends.torch":
            raise ImportError("Numba needs NumPy 2.9 or less")
        return original(name, *rest)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", broken)
    said = without_cpu_kernel.__wrapped__()
    assert said == "ImportError: Numba needs NumPy 2.9 or less"
    monkeypatch.undo()
    monkeypatch.setattr(layers, "without_cpu_kernel", lambda: said)
    assert loaded().executor(CONFIG, print, 2**24)[0].info.kv_dtype == ""


def loaded(*, pack: bool = True) -> Loaded:
    model = zoo.build("llama")
    if pack:
        weights.pack(model, kind="int8")
    info = replace(zoo.info("llama"), computes_in="bfloat16" if pack else "")
    return Loaded(model, info, devices.select("cpu"), (), None)


CONFIG = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=2)


def test_packed_models_keep_float16_and_others_do_not() -> None:
    executor, notes = loaded().executor(CONFIG, print, 2**24)
    assert executor.info.kv_dtype == "float16"
    assert {storage.keys.dtype for storage in executor._packed.storages} == {torch.float16}
    assert notes == []
    whole, _ = loaded(pack=False).executor(CONFIG, print, 2**24)
    assert whole.info.kv_dtype == ""
    assert 2 * executor.memory().kv_bytes_per_token == whole.memory().kv_bytes_per_token
    assert 2 * executor.memory().kv_pool_bytes == whole.memory().kv_pool_bytes


def test_values_beyond_float16_are_kept_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel does not prove right: float16 that nothing reads quickly is worth nothing."""
    great = loaded()
    for layer in great.model.model.layers:
        layer.input_layernorm.weight.data *= 1e6
    executor, notes = great.executor(CONFIG, print, 2**24)
    assert executor.info.kv_dtype == ""
    assert len(notes) == 1
    assert notes[0].startswith("K and V are kept in float32 instead of float16: llama is not exact")

    monkeypatch.setattr(executor_module, "cpu_kernel", lambda: attend_nothing)
    executor, notes = loaded().executor(CONFIG, print, 2**24)
    assert executor.info.kv_dtype == ""
    assert notes[0].startswith("K and V are kept in float32 instead of float16: paged kernel: 1 rows a seq")


def attend_nothing(*given: Any) -> None:
    given[4].zero_()


def test_half_is_not_asked_of_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process."""
    monkeypatch.setattr(cpu_kernel, "reads_half", lambda: False)
    with pytest.raises(ValueError, match="no instruction to read float16"):
        cpu_kernel.worker.__wrapped__(16, 16, 3, True)
    assert loaded().executor(CONFIG, print, 2**24)[0].info.kv_dtype == ""


KEPT = """
import sys
from ferrum_mlx.backends.torch import cpu_kernel
assert cpu_kernel.OPTIONS["cache"]
assert cpu_kernel.worker(24, 24, 1, True).address
"""


def test_compiled_code_is_kept_for_the_next_start(tmp_path: Path) -> None:
    kept: list[set[str]] = []
    for _ in range(2):
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", KEPT], env=env, check=True, timeout=120)
        kept.append({file.name for file in tmp_path.rglob("*.nbc")})
    assert kept[0] == kept[1]
    assert any("worker" in name for name in kept[0])


def test_a_task_that_was_not_done_is_an_error() -> None:
    with pytest.raises(FerrumError, match="was not computed"):
        outcome(CPUAttention(lambda function, argument: None), case_of(0))


@pytest.mark.parametrize("window", [1, 63, 64, 100, 513, 1025])
def test_windows_and_sinks_over_several_pieces(window: int) -> None:
    """Blocks that a window has left are the null block, whatever is in there."""
    given, how = many()
    tables = given["tables"]
    noise = torch.Generator().manual_seed(window)
    for softcap, sinks in ((None, None), (2.0, torch.randn(6, generator=noise))):
        kind = replace(how, window=window, softcap=softcap, sinks=sinks)
        want = outcome(by_rows, (given, kind))
        blocks = tables.blocks.clone()
        for first, context in zip(tables.firsts.tolist(), tables.contexts.tolist(), strict=True):
            blocks[first : first + max(0, context - 2 - window) // 16] = 0
        left = {**given, "tables": replace(tables, blocks=blocks, made={})}
        for name in ("keys", "values"):
            left[name][:16] = torch.nan
        torch.testing.assert_close(outcome(TEAM, (left, kind)), want, atol=1e-5, rtol=0)
