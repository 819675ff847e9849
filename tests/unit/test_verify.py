"""`verify` on tiny models: sound ones hold, and every kind of broken one has its fault found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.backends.mlx.pools import PoolStorage
from ferrum_mlx.backends.step import Step
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.nearties import NearTie
from ferrum_mlx.output import OutputStream
from ferrum_mlx.verify.checks import greedy
from ferrum_mlx.verify.compare import Comparison, Row
from ferrum_mlx.verify.likelihood import likelihood, nll
from ferrum_mlx.verify.memory import check_pools
from ferrum_mlx.verify.report import Report, verify
from ferrum_mlx.verify.runs import Library, Output, Subject, run

from ..contract.conftest import BACKENDS, tiny_config
from .verify_subjects import (
    BROKEN,
    corrupt_block_tables,
    forget_snapshots,
    let_neighbours_add_noise,
    over,
    paged,
    stateful,
    subject,
)

EQUALITIES = [
    "paged = dense",
    "batched = alone",
    "chunked = whole",
    "prefix hit = miss",
    "preempted = not",
    "speculation = plain",
    "seed alone = beside others",
]


def outcomes(report: Report) -> dict[str, str]:
    return {row.check: row.outcome for row in report.rows}


def row(report: Report, check: str) -> Row:
    return next(row for row in report.rows if row.check == check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sound_model_has_no_fault(backend: str) -> None:
    sound = subject(backend)
    told: list[str] = []
    report = verify(sound, told.append)
    assert [row(report, name).outcome for name in EQUALITIES] == ["equal ids"] * len(EQUALITIES)
    assert all(row(report, name).first is None for name in EQUALITIES)
    assert row(report, "logprobs = the logits'").outcome == "consistent"
    assert report.num_faults == 0
    assert sound.executor.kv_capacity_snapshot().used_blocks == 0
    assert len(told) == 1 + len(report.rows)  # the plain run, and a line a check
    seen = {name: row(report, name).detail for name in EQUALITIES}
    assert "together" in seen["batched = alone"]
    assert not seen["batched = alone"].startswith("up to 1 together")
    assert " 0 steps" not in seen["batched = alone"]
    assert seen["prefix hit = miss"] == "10 prompts found 520 tokens"
    assert seen["preempted = not"] == "10 of 10 preempted"


@pytest.mark.parametrize("backend", ["fake", "mlx-host"])
def test_exact_is_said_of_equal_bits_under_exact_numerics_alone(backend: str) -> None:
    report = verify(subject(backend, numerics="exact"))
    same_route = EQUALITIES[1:]
    assert [row(report, name).outcome for name in same_route] == ["exact"] * len(same_route)
    assert [row(report, name).largest_difference for name in same_route] == [0.0] * len(same_route)
    assert "exact" not in outcomes(verify(subject(backend))).values()


@pytest.mark.parametrize("backend", ["fake", "mlx-host"])
@pytest.mark.parametrize(("break_it", "check"), BROKEN.items())
def test_a_fault_is_found(backend: str, break_it: Callable[[Subject], None], check: str) -> None:
    broken = subject(backend)
    break_it(broken)
    report = verify(broken)
    assert row(report, check).outcome == "fault"
    assert row(report, check).detail
    assert report.num_faults
    assert "fault" in report.table()


# Quantized KV

QUANTIZED = [("mlx-host", 8), ("mlx-host", 4), ("mlx", 8), pytest.param("torch", 8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("backend", "bits"), QUANTIZED[: 4 if "torch" in BACKENDS else 3])
def test_quantized_kv_has_a_bound_and_all_else_is_equal(backend: str, bits: int) -> None:
    report = verify(subject(backend, numerics="exact", kv_bits=bits, max_model_len=200))
    found = row(report, "quantized KV = the model's")
    assert found.outcome == "within its bound", found.detail
    assert f"with int{bits}" in found.detail
    share = {8: "5%", 4: "20%"}[bits]
    assert f"int{bits} KV: logits may be {share} of the largest apart" in row(report, "paged = dense").detail
    assert report.num_faults == 0
    by_shape = backend == "mlx"  # its kernels round a row by its company
    allowed = {"exact", "equal ids", "rounding"} if by_shape else {"exact"}
    assert {row(report, name).outcome for name in EQUALITIES[1:]} <= allowed


@pytest.mark.parametrize(("bits", "change", "outcome"), [
    (8, 0.009, "within its bound"), (8, 0.011, "fault"), (8, -0.011, "fault"), (8, float("nan"), "fault"),
    (4, 0.049, "within its bound"), (4, 0.051, "fault"),
])  # fmt: skip
def test_a_likelihood_beyond_the_bound_is_a_fault(
    bits: int, change: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`change` of the NLL against the model's own; that of a random model does not depend on its KV."""
    quantized = subject("mlx-host", kv_bits=bits)
    plain = likelihood(quantized).detail
    ours = float(plain.split(" tokens ")[1].split()[0])
    monkeypatch.setattr("ferrum_mlx.verify.likelihood.nll", lambda logits, ids: ours / (1 + change))
    found = likelihood(quantized)
    assert found.outcome == outcome
    assert f"with int{bits}" in found.detail


def test_nll_is_what_the_definition_says() -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.normal(size=(150, 20)).astype(np.float32), rng.integers(20, size=150).tolist()
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    assert nll(logits, ids) == pytest.approx(-np.log(p[np.arange(149), ids[1:]]).mean())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_wider_limits_of_quantized_kv_still_find_a_wrong_block(bits: int) -> None:
    broken = subject("mlx-host", kv_bits=bits)
    corrupt_block_tables(broken)
    assert row(verify(broken), BROKEN[corrupt_block_tables]).outcome == "fault"


def test_of_noise_from_neighbours_nothing_greedy_is_blamed() -> None:
    broken = subject("mlx-host")
    let_neighbours_add_noise(broken)
    report = verify(broken)
    assert [r.check for r in report.rows if r.outcome == "fault"] == ["seed alone = beside others"]
    found = row(report, "seed alone = beside others").first
    assert found is not None
    assert f"prompt {found[0]}, output {found[1].step}" in report.table()


def test_a_failed_forward_is_a_fault_of_its_check_and_leaves_no_block() -> None:
    broken = subject("fake")
    executor = paged(broken)
    launch = executor._launch

    def fails(batch: object) -> object:
        if len(batch.items) > 3:  # type: ignore[attr-defined]
            raise RuntimeError("out of luck")
        return launch(batch)  # type: ignore[arg-type]

    executor._launch = fails  # type: ignore[method-assign,assignment]
    report = verify(broken)
    assert row(report, "batched = alone").outcome == "fault"
    assert "out of luck" in row(report, "batched = alone").detail
    assert executor.kv_capacity_snapshot().used_blocks == 0


def test_a_failed_request_leaves_no_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text fails while the next step of it is on its way, and the next check has the same executor."""
    config = tiny_config()
    ahead = over(FakeExecutor(config, one_step_ahead=True), config, "fake")
    monkeypatch.setattr(OutputStream, "add", lambda *_: 1 / 0)
    with pytest.raises(FerrumError, match="ZeroDivision"):
        run(ahead, {0: [greedy("a", [1, 2, 3])]})
    monkeypatch.undo()
    assert paged(ahead).kv_capacity_snapshot().used_blocks == 0
    assert len(run(ahead, {0: [greedy("a", [1, 2, 3])]}).outputs["a"].ids) == 8


# Recurrent layers


def test_a_snapshot_s_hit_is_checked_where_there_are_states() -> None:
    report = verify(stateful())
    assert row(report, "snapshot hit = miss").outcome == "equal ids"
    assert row(report, "prefix hit = miss").outcome == "not applicable"
    assert outcomes(verify(subject("fake")))["snapshot hit = miss"] == "not applicable"


def test_a_lost_snapshot_is_found() -> None:
    broken = stateful()
    forget_snapshots(broken)
    report = verify(broken)
    assert [r.check for r in report.rows if r.outcome == "fault"] == ["snapshot hit = miss"]


# The pools


def test_pools_written_in_place() -> None:
    report = verify(subject("mlx", blocks=20_000))
    found = row(report, "no pool is copied")
    assert found.outcome == "in place"
    assert "the smallest pool has 5.12 MB" in found.detail


def test_a_copied_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PoolStorage.write

    def copies(self: PoolStorage, step: Step, *args: mx.array) -> None:
        view = step.once(("a live view", id(self)), lambda: self.keys[:1])
        mx.eval(view)
        write(self, step, *args)

    broken = subject("mlx", blocks=20_000)
    monkeypatch.setattr(PoolStorage, "write", copies)
    report = verify(broken)
    assert [r.check for r in report.rows if r.outcome == "fault"] == ["no pool is copied"]


def test_a_copy_of_the_codes_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales and biases, half of such a pool, are written in place; so is all of it at first."""
    quantized = subject("mlx", blocks=40_000, kv_bits=4)
    write, request = PoolStorage.write, greedy("memory", [1, 2, 3])
    pool = quantized.executor._packed.storages[0].keys  # type: ignore[attr-defined]
    assert quantized.executor.memory().smallest_pool_bytes == pool.codes.nbytes < pool.nbytes
    assert check_pools(quantized, request).outcome == "in place"

    def copies(self: PoolStorage, step: Step, *args: mx.array) -> None:
        view = step.once(("a live view", id(self)), lambda: self.keys.codes[:1])
        mx.eval(view)
        write(self, step, *args)

    monkeypatch.setattr(PoolStorage, "write", copies)
    assert check_pools(quantized, request).outcome == "fault"


@pytest.mark.parametrize(
    ("backend", "outcome"), [("mlx", "refused"), ("mlx-host", "not applicable"), ("fake", "not applicable")]
)
def test_pools_that_cannot_tell(backend: str, outcome: str) -> None:
    found = row(verify(subject(backend, blocks=160)), "no pool is copied")
    assert found.outcome == outcome
    assert found.detail


# The library


def test_mlx_lm_s_own_generate() -> None:
    from ferrum_mlx.backends.mlx.reference import generate

    mlx_lm = Library("mlx-lm", generate)
    report = verify(subject("mlx-host", library=mlx_lm))
    found = row(report, "paged = library's generate")
    assert (found.outcome, found.detail) == ("equal ids", "mlx-lm")
    assert found.largest_difference is not None
    broken = subject("mlx-host", library=mlx_lm)
    corrupt_block_tables(broken)
    assert row(verify(broken), "paged = library's generate").outcome == "fault"


def test_a_library_that_does_not_run() -> None:
    def generate(executor: object, prompt: Sequence[int], count: int) -> tuple[list[int], np.ndarray]:
        raise TypeError("no such cache")

    found = row(verify(subject("fake", library=Library("lib", generate))), "paged = library's generate")
    assert found.outcome == "refused"
    assert "lib's generate does not run here: TypeError: no such cache" in found.detail


def test_no_library() -> None:
    assert row(verify(subject("fake")), "paged = library's generate").outcome == "not applicable"


# What cannot be checked


def test_no_prefix_cache() -> None:
    found = row(verify(subject("fake", prefix_cache=False)), "prefix hit = miss")
    assert (found.outcome, found.detail) == ("refused", "--no-prefix-cache")


def test_a_pool_for_one_request() -> None:
    report = verify(subject("fake", blocks=5, max_model_len=20))
    assert outcomes(report)["batched = alone"] == "refused"
    assert outcomes(report)["seed alone = beside others"] == "refused"
    assert "--kv-memory" in row(report, "batched = alone").detail
    assert report.num_faults == 0


def test_prompts_no_longer_than_a_block() -> None:
    report = verify(subject("fake", block_size=16, max_model_len=16))
    assert row(report, "prefix hit = miss").outcome == "refused"
    assert "the longest prompt has 8 tokens, a block 16" in row(report, "prefix hit = miss").detail


def test_a_pool_that_keeps_no_prompt() -> None:
    found = row(verify(subject("fake", blocks=30)), "prefix hit = miss")
    assert found.outcome == "refused"
    assert "the KV pool is too small to keep ten prompts; raise --kv-memory" in found.detail


# Verdicts


def compared(gap: float, delta: float, *, ties: int = 1, exact: bool = True, **how: object) -> Row:
    """Ten prompts, of which `ties` differ: theirs prefers 0 to 1 by `gap`, ours differs by `delta`."""
    comparison = Comparison(**({"dtype": "float32"} | how))  # type: ignore[arg-type]
    row = np.array([1.0, 1.0 - gap, 0.0], dtype=np.float32)
    moved = row + np.array([0, delta, 0], dtype=np.float32)
    for i in range(10):
        theirs = Output([0, 0], [row, row])
        ours = Output([0, 1], [row, moved]) if i < ties else Output([0, 0], [row, row])
        comparison.add([5], ours, theirs)
    return comparison.row(exact=exact)


def test_verdicts() -> None:
    assert compared(0.5, 0.0, ties=0).outcome == "exact"
    assert compared(0.5, 0.0, ties=0, exact=False).outcome == "equal ids"
    tie = compared(1e-4, 1.5e-4)
    assert tie.outcome == "near-tie"
    assert tie.first is not None
    assert isinstance(tie.first[1], NearTie)
    assert "prompt 0: NearTie at output 1: ours 1, theirs 0, 0.0001 apart" in tie.detail
    assert "at most 0.00015" in tie.detail
    assert tie.top1 == pytest.approx(0.95)
    assert tie.largest_difference == pytest.approx(1.5e-4, rel=1e-2)
    assert compared(1e-4, 1.5e-4, ties=2).outcome == "fault"  # more than one prompt in ten
    assert compared(1e-4, 1.5e-4, sampled=True).outcome == "fault"  # noise explains nothing
    assert compared(0.1, 0.2).outcome == "fault"
    assert compared(0.1, 0.0).outcome == "fault"
    assert compared(0.1, float("nan"), ties=1).outcome == "fault"


def test_sixteen_bits_round_more_coarsely_and_have_no_near_ties() -> None:
    assert compared(0.02, 0.05, ties=4, dtype="bfloat16").outcome == "rounding"
    assert compared(0.02, 0.05, dtype="float16").outcome == "fault"
    assert compared(0.5, 0.6, dtype="bfloat16").outcome == "fault"


def test_kl_is_that_of_the_reference_against_ours() -> None:
    comparison = Comparison("bfloat16")
    p, q = np.array([0.5, 0.5]), np.array([0.49, 0.51])
    comparison.add([1], Output([1], [np.log(q)]), Output([1], [np.log(p)]))
    assert comparison.row(exact=False).kl == pytest.approx(float((p * np.log(p / q)).sum()))


def test_logits_too_far_apart_are_a_fault_whatever_the_ids() -> None:
    comparison = Comparison("float32")
    row = np.array([3.0, 1.0], dtype=np.float32)
    comparison.add([1], Output([0], [row + np.float32(0.002)]), Output([0], [row]))
    assert comparison.row(exact=False).outcome == "fault"


def test_banned_ids_are_no_difference() -> None:
    comparison = Comparison("float32")
    row = np.array([3.0, -np.inf], dtype=np.float32)
    comparison.add([1], Output([0], [row]), Output([0], [row]))
    found = comparison.row(exact=True)
    assert (found.outcome, found.largest_difference, found.kl) == ("exact", 0.0, 0.0)


def test_an_output_cut_short_is_a_fault() -> None:
    comparison = Comparison("float32")
    row = np.array([3.0, 1.0], dtype=np.float32)
    comparison.add([1], Output([0], [row]), Output([0, 0], [row, row]))
    found = comparison.row(exact=True)
    assert (found.outcome, found.detail) == ("fault", "prompt 0: 1 tokens came instead of 2")


def test_the_object_for_programs() -> None:
    report = verify(subject("fake"))
    told = json.loads(json.dumps(report.as_json()))
    assert told["ok"] is True
    assert (told["backend"], told["numerics"], told["prompts"], told["tokens"]) == ("fake", "fast", 10, 8)
    assert [check["check"] for check in told["checks"]] == [row.check for row in report.rows]
    assert told["checks"][0].keys() == {
        *("check", "outcome", "detail", "largest_difference", "kl", "top1", "first_difference", "seconds")
    }
