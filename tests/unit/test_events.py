"""The records of an engine, and where they go."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.events import (
    CallbackSink,
    EventLog,
    FirstToken,
    JsonlSink,
    Record,
    RequestAdmitted,
    RequestEnded,
    RequestPreempted,
    RequestQueued,
    RequestResumed,
    StepDone,
    to_json,
)
from ferrum_mlx.llm import LLM
from ferrum_mlx.messages import Event, Finished, Notice, Stepped, Submit
from ferrum_mlx.metrics import KVUsage, StepStats
from ferrum_mlx.sampling import SamplingParams

from .client_driver import FAKE, SHORT, WAIT, text_of, until

STEP = StepDone(StepStats(step=1, kv=KVUsage(16, 10, 2)))
QUEUED = RequestQueued("r", 5, 0)
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Lines


@pytest.mark.parametrize(
    ("record", "event", "facts"),
    [
        (QUEUED, "queued", {"request_id": "r", "prompt_tokens": 5, "priority": 0, "adapter": ""}),
        (RequestAdmitted("r", 5, 4), "admitted", {"request_id": "r", "tokens": 5, "cached_tokens": 4}),
        (RequestPreempted("r", 7), "preempted", {"request_id": "r", "computed_tokens": 7}),
        (RequestResumed("r", 8, 4), "resumed", {"request_id": "r", "tokens": 8, "cached_tokens": 4}),
        (FirstToken("r", 0.5), "first_token", {"request_id": "r", "ttft_s": 0.5}),
        (STEP, "step", {"stats": asdict(STEP.stats)}),
        *(
            (
                RequestEnded("r", reason, None, "why"),
                event,
                {"request_id": "r", "reason": reason, "stats": None, "error": "why"},
            )
            for reason, event in {
                "stop": "finished",
                "length": "finished",
                "abort": "aborted",
                "error": "failed",
            }.items()
        ),
    ],
)
def test_a_line_holds_what_the_module_says(record: Record, event: str, facts: dict[str, Any]) -> None:
    line = json.loads(to_json(record))
    assert line == {"event": event, "time": record.time, "monotonic": record.monotonic, **facts}


@pytest.mark.parametrize("request_id", ['"\n', "\ud800", "漢字", "\x00"])
def test_any_request_id_makes_one_line(request_id: str) -> None:
    text = to_json(RequestQueued(request_id, 1, 0))
    assert len(text.encode().splitlines()) == 1
    assert json.loads(text)["request_id"] == request_id


# The file


def test_a_step_brings_everything_to_the_file(tmp_path: Path) -> None:
    sink = JsonlSink(str(tmp_path / "events"))
    sink.record(QUEUED)
    sink.record(STEP)
    assert [line["event"] for line in lines(tmp_path / "events")] == ["queued", "step"]
    sink.record(QUEUED)
    sink.close()
    assert [line["event"] for line in lines(tmp_path / "events")] == ["queued", "step", "queued"]


def test_a_file_is_appended_to_and_a_line_cut_short_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for _ in range(2):
        sink = JsonlSink(str(path))
        sink.record(STEP)
        sink.close()
    assert len(lines(path)) == 2
    with path.open("a") as file:
        file.write('{"event": "st')
    sink = JsonlSink(str(path))
    sink.record(STEP)
    sink.close()
    whole, cut = path.read_text().splitlines()[::3], path.read_text().splitlines()[2]
    assert (len(whole), cut) == (2, '{"event": "st')
    assert [json.loads(line)["event"] for line in whole] == ["step", "step"]


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path) -> None:
    sink = JsonlSink(str(tmp_path / "events"))

    class Slow:
        taken = b""

        def write(self, data: memoryview) -> int:
            self.taken += bytes(data[:7])
            return min(7, len(data))

        def close(self) -> None: ...

    sink._file.close()
    slow: Any = Slow()
    sink._file = slow
    sink.record(STEP)
    assert slow.taken.decode() == to_json(STEP) + "\n"


@pytest.mark.parametrize("where", ["", "missing/events"])
def test_a_file_that_cannot_be_opened_is_told_before_anything_is_loaded(tmp_path: Path, where: str) -> None:
    with pytest.raises(FerrumError, match=r"events file .* cannot be written"):
        LLM(model=str(tmp_path / "no such model"), events=str(tmp_path / where))


# Sinks that fail


def failing(error: Exception) -> CallbackSink:
    def fail(record: Record) -> None:
        raise error

    return CallbackSink(fail)


def test_a_sink_that_fails_is_told_once_and_its_neighbour_goes_on() -> None:
    seen: list[Record] = []
    log = EventLog(failing(ValueError("two\nlines")), CallbackSink(seen.append))
    for _ in range(3):
        log.add(QUEUED, STEP)
    (note,) = log.take_notes()
    assert note == "the callback for events failed and is off from here on: ValueError: two lines"
    assert log.take_notes() == []
    assert seen == [QUEUED, STEP] * 3
    assert bool(log)


@needs_full_disk
def test_a_full_disk_is_told_once() -> None:
    log = EventLog(JsonlSink("/dev/full"))
    log.add(STEP)
    log.add(STEP)
    (note,) = log.take_notes()
    assert "'/dev/full'" in note
    assert "No space left" in note
    assert not log
    log.close()


def test_a_closed_file_is_told_once(tmp_path: Path) -> None:
    sink = JsonlSink(str(tmp_path / "events"))
    log = EventLog(sink)
    sink._file.close()
    log.add(STEP)
    log.add(STEP)
    assert len(log.take_notes()) == 1
    log.close()


# What an engine says


def run(requests: dict[str, str], max_tokens: int = 12, **settings: Any) -> tuple[list[Record], list[Event]]:
    """The records and the events of requests that all run together."""
    config = EngineConfig(**({"block_size": 4, "max_model_len": 64} | settings))
    records: list[Record] = []
    executor = FakeExecutor(config)
    executor.prepare_startup()
    log = EventLog(CallbackSink(records.append))
    engine = Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test", log=log)
    events: list[Event] = []
    for name, prompt in requests.items():
        engine.submit(Submit(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    while engine.has_work():
        events += engine.step()
        if "gone" in requests:
            engine.abort("gone")
    return records, events


def story(records: list[Record], name: str) -> list[str]:
    return [r.event for r in records if not isinstance(r, StepDone) and r.request_id == name]


def test_a_request_s_transitions_in_order() -> None:
    records, events = run({"fine": "hello", "gone": "hello again", "long": "x" * 64})
    assert story(records, "fine") == ["queued", "admitted", "first_token", "finished"]
    assert story(records, "gone")[-1] == "aborted"
    assert story(records, "long") == ["failed"]
    (refused,) = [r for r in records if isinstance(r, RequestEnded) and r.request_id == "long"]
    assert refused.stats is None
    assert "64 tokens" in refused.error
    times = [record.monotonic for record in records]
    assert times == sorted(times)
    (ended,) = [r for r in records if isinstance(r, RequestEnded) and r.request_id == "fine"]
    (finished,) = [e for e in events if isinstance(e, Finished) and e.request_id == "fine"]
    assert ended.stats == finished.stats
    assert finished.stats.usage.completion_tokens == 12
    assert finished.stats.itl.count == 11


def test_a_record_for_every_step_and_its_parts_make_the_whole() -> None:
    records, events = run({"a": "hello", "b": "world"})
    steps = [record.stats for record in records if isinstance(record, StepDone)]
    assert steps == [event.stats for event in events if isinstance(event, Stepped)]
    for step in steps:
        assert step.seconds == pytest.approx(step.schedule_s + step.forward_s + step.commit_s, abs=1e-9)
        assert min(step.schedule_s, step.forward_s, step.commit_s) >= 0
    assert (sum(s.prefill_tokens for s in steps), sum(s.decode_tokens for s in steps)) == (10, 22)
    assert sum(s.admitted_tokens for s in steps) == 10
    assert (steps[-1].running, steps[-1].waiting, steps[-1].preempted) == (0, 0, 0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemptions_and_replays_add_up(prefix_cache: bool) -> None:
    """Five requests on a pool for one: what is told of each equals what the steps were told."""
    prompts = {f"r{i}": "p" * (i + 3) for i in range(5)}
    records, events = run(prompts, max_tokens=20, kv_memory=7 * 4 * 4, prefix_cache=prefix_cache)
    steps = [record.stats for record in records if isinstance(record, StepDone)]
    ends = {e.request_id: e.stats for e in events if isinstance(e, Finished)}
    preempted = [r for r in records if isinstance(r, RequestPreempted)]
    assert len(preempted) == steps[-1].preemptions == sum(s.preemptions for s in ends.values()) > 0
    assert max(s.preempted for s in steps) > 0
    assert len([r for r in records if isinstance(r, RequestResumed)]) == len(preempted)
    for name, stats in ends.items():
        mine = [r for r in preempted if r.request_id == name]
        assert stats.preemptions == len(mine)
        again = [r for r in records if isinstance(r, RequestResumed) and r.request_id == name]
        lost = zip(mine, again, strict=True)
        assert stats.replayed_tokens == sum(p.computed_tokens - r.cached_tokens for p, r in lost)
        middle = story(records, name)[1:-1]
        assert middle[0] == "admitted"
        moves = [event for event in middle[1:] if event != "first_token"]
        assert moves == ["preempted", "resumed"] * len(mine)
    computed = sum(s.prefill_tokens + s.decode_tokens for s in steps)
    for s in ends.values():
        computed -= s.usage.prompt_tokens - s.usage.cached_tokens + s.usage.completion_tokens - 1
    assert computed == sum(s.replayed_tokens for s in ends.values())
    assert computed > 0


def test_cached_tokens_are_told_alike_everywhere() -> None:
    shared = "a shared beginning of a few blocks "
    config = EngineConfig(backend="fake", block_size=4)
    with EngineClient.in_thread(config) as client:
        client.start(WAIT)
        stats = []
        for tail in ("one", "two"):
            (end,) = [e for e in client.submit(shared + tail, SHORT) if isinstance(e, Finished)]
            stats.append(end.stats)
        totals = client.totals()
    assert [s.usage.cached_tokens for s in stats] == [0, len(shared) // 4 * 4]
    assert totals.cached_tokens == stats[1].usage.cached_tokens
    assert totals.admitted_tokens == sum(s.usage.prompt_tokens for s in stats)
    assert totals.last_step is not None
    assert totals.last_step.cache.saved_prefill_tokens == totals.cached_tokens
    assert (totals.last_step.cache.hits, totals.last_step.cache.misses) == (1, 1)


# From end to end


@pytest.mark.parametrize("form", [EngineClient.in_thread, EngineClient.in_process])
def test_both_transports_write_the_file(form: Callable[..., EngineClient], tmp_path: Path) -> None:
    path = tmp_path / "events"
    with form(EngineConfig(backend="fake", events=str(path))) as client:
        client.start(WAIT)
        text_of(client.submit("hello", SHORT, request_id="mine"))
    written = lines(path)
    mine = [line["event"] for line in written if line.get("request_id") == "mine"]
    assert mine == ["queued", "admitted", "first_token", "finished"]
    assert sum(line["event"] == "step" for line in written) == 12


@needs_full_disk
@pytest.mark.parametrize("form", [EngineClient.in_thread, EngineClient.in_process])
def test_a_full_disk_ends_no_engine_and_the_user_is_told(form: Callable[..., EngineClient]) -> None:
    notes: list[str] = []
    with form(EngineConfig(backend="fake", events="/dev/full"), on_note=notes.append) as client:
        client.start(WAIT)
        assert len(text_of(client.submit("hello", SHORT))) == 12
        assert len(text_of(client.submit("hello again", SHORT))) == 12
        until(lambda: bool(notes))
    assert len(notes) == 1
    assert "No space left" in notes[0]


def test_a_callback_hears_what_the_file_holds(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Record] = []
    with LLM(backend="fake", on_event=heard.append) as llm:
        llm.generate("hello", SHORT)
    assert story(heard, "1") == ["queued", "admitted", "first_token", "finished"]

    def broken(record: Record) -> None:
        raise RuntimeError("no thanks")

    with LLM(backend="fake", on_event=broken) as llm:
        outputs = list(itertools.chain(llm.generate("hello", SHORT), llm.generate("hello", SHORT)))
    assert [len(output.token_ids) for output in outputs] == [12, 12]
    assert [message for message in caplog.messages if "no thanks" in message] == [
        "the callback for events failed and is off from here on: RuntimeError: no thanks"
    ]


def test_an_engine_without_listeners_says_nothing() -> None:
    config = FAKE
    engine = Engine(FakeExecutor(config), FakeCodec(), config, backend="fake", backend_reason="test")
    engine.submit(Submit("r", "hello", SHORT))
    events: list[Event] = []
    while engine.has_work():
        events += engine.step()
    assert not [event for event in events if isinstance(event, Notice)]


def test_a_pipe_that_nobody_reads_is_an_error_and_a_full_one_is_off_and_said(tmp_path: Path) -> None:
    """Neither may keep the engine waiting."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    with pytest.raises(FerrumError, match="cannot be written"):
        JsonlSink(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = EventLog(JsonlSink(pipe))
    for _ in range(3000):
        log.add(StepDone(StepStats(kv=KVUsage(16, 1, 0))))
    assert len(notes := log.take_notes()) == 1
    assert "nobody reads the pipe fast enough" in notes[0]
    assert not log
    os.close(reader)
