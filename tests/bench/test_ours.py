"""This engine under test: a fake that takes a second a token, and what the bench makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_mlx.bench import workloads
from ferrum_mlx.bench.ours import Ours, drive
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.build import build_subject
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import ContextLengthError, FerrumError
from ferrum_mlx.events import CallbackSink, RequestQueued
from ferrum_mlx.verify.runs import Subject

from .bench_systems import slow_subject


def measured(subject: Subject, case: Case, seed: str = "0") -> dict[str, float]:
    ours = Ours(subject, subject.config)
    return case.figures(ours.run(case, case.make(seed, subject.executor.info.vocab_size)))


def test_a_prompt_s_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(slow_subject(monkeypatch), workloads.prefill(600, 0, 1))
    assert figures == {"ttft_s": 600.0, "prefill_tps": 1.0}


def test_a_depth_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(slow_subject(monkeypatch), workloads.prefill(64, 320, 2))
    assert figures["cached_tokens"] == 2 * 320
    assert figures["prefill_tps"] == 1.0


@pytest.mark.parametrize("batch", [1, 4])
def test_decode_is_measured_in_full_batches_alone(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """A step of `batch` rows takes as many seconds, so a second brings a token, whatever the depth."""
    figures = measured(slow_subject(monkeypatch), workloads.decode(16, 300, batch, 512))
    assert figures["decode_tps"] == 1.0
    assert figures["itl_p50_s"] == figures["itl_p99_s"] == batch


def test_a_shared_prefix_is_found_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(slow_subject(monkeypatch), workloads.shared_prefix())
    assert figures["cached_tokens"] == 7 * 512


def test_a_turn_brings_the_history_and_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(slow_subject(monkeypatch), workloads.multi_turn(turns=3))
    assert figures["cached_tokens"] > 2 * 256


def test_repetitions_find_nothing_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = slow_subject(monkeypatch)
    found = [measured(subject, workloads.ragged(), seed) for seed in ("0", "1")]
    assert [figures.get("cached_tokens") for figures in found] == [None, None]


def test_a_text_is_computed_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = slow_subject(monkeypatch)
    ours = Ours(subject, subject.config)
    case = replace(workloads.of_texts("chat", 8), texts=("Why?",))
    runs = [ours.run(case, [Arrival("answer", list(range(64, 164)), 8)]) for _ in range(2)]
    assert [run.streams[0].times[0] - run.streams[0].arrived for run in runs] == [100.0, 100.0]
    assert runs[0].streams[0].ids == runs[1].streams[0].ids


def test_the_others_are_ended_when_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = slow_subject(monkeypatch)
    measured(subject, workloads.admission(streams=2, prompt=200))
    assert subject.executor.kv_capacity_snapshot().used_blocks == 0


def test_what_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextLengthError):
        measured(slow_subject(monkeypatch, max_model_len=64), workloads.prefill(100, 0, 1))


def test_a_request_that_is_never_due_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = slow_subject(monkeypatch)
    with pytest.raises(FerrumError, match="never due"):
        drive(subject.engine, [Arrival("one", [70], 2), Arrival("two", [71], 2, after=99)])


def test_an_answer_ends_by_itself_only_to_find_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from ferrum_mlx.backends.fake import EOS, FakeExecutor, scripted

    subject = slow_subject(monkeypatch)
    assert isinstance(subject.executor, FakeExecutor)
    subject.executor.script = scripted(b"abc", 2)
    ours, case = Ours(subject, subject.config), workloads.of_texts("chat", 8)
    assert ours.answer(case, [70, 71]) == [*b"abc", EOS]
    assert len(ours.run(case, [Arrival("answer", [70, 71], 6)]).streams[0].ids) == 6


def test_the_time_of_steps_that_only_decode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from ferrum_mlx import engine

    moments = iter(range(10_000))
    subject = slow_subject(monkeypatch)
    monkeypatch.setattr(engine, "perf_counter", lambda: float(next(moments)))
    run = drive(subject.engine, [Arrival("one", [70] * 40, 5)])
    assert 0 < run.forward_s < run.step_s


def test_what_is_measured_goes_through_the_adapter_and_the_answer_does_not() -> None:
    config = EngineConfig(backend="fake", adapters=(("a", "."),))
    subject, queued = build_subject(config), []

    def listen(record: object) -> None:
        queued.extend([record.adapter] if isinstance(record, RequestQueued) else [])

    subject.engine.log.attach(CallbackSink(listen))
    ours, case = Ours(subject, config, "a"), workloads.decode(4, 0, 2, 512)
    ours.run(case, case.make("0", 258))
    assert set(queued) == {"a"}
    queued.clear()
    ours.answer(case, [70, 71])
    assert queued == [""]
