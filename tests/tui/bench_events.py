"""A benchmark that is a script: a hand on its clock, and its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from queue import SimpleQueue

from ferrum_mlx.bench.checks import DIFFERS, EQUAL, FAULT, NEAR_TIE, NOT_CHECKED, Check
from ferrum_mlx.bench.progress import Absent, Bandwidth, Begun, Event, Kept, Key, Planned, Row, Said, Skipped
from ferrum_mlx.messages import Ready

from .engine_readings import ready

OURS, PEER = "ferrum-mlx", "mlx-lm"
PP, PP_PEER = ("pp512", 1, OURS), ("pp512", 1, PEER)
LONG, LONG_PEER = ("admission", 7, OURS), ("admission", 7, PEER)
TG, TG_PEER = ("tg128", 2, OURS), ("tg128", 2, PEER)


def plan(reps: int = 2) -> Planned:
    rows = [
        Row(key, "" if key[2] == OURS else "generate", figure, reps)
        for figure, keys in (
            ("prefill_tps", (PP, PP_PEER)),
            ("longest_gap_s", (LONG, LONG_PEER)),
            ("decode_tps", (TG, TG_PEER)),
        )
        for key in keys
    ]
    return Planned(OURS, tuple(rows), reps, 7)


def tiny() -> Ready:
    """A model whose maker would like to steer the terminal."""
    told = ready()
    info = replace(told.info, model_id="Tiny [b]\x1b[31m", quality="")
    return replace(told, info=info, backend="mlx", notes=("a note [x]\x1b[2J",))


def run(key: Key, rep: int, **figures: float) -> Iterator[Event]:
    yield Said(f"{rep + 1} of 2: {key[0]}, {key[2]}")
    yield Begun(key, rep)
    yield Kept(key, rep, figures)


def halfway() -> Iterator[Event]:
    """Everything there is to show: what is kept, runs, waits, is left out and absent; every outcome."""
    yield tiny()
    yield plan()
    yield Bandwidth(100e9)
    yield Absent("llama.cpp", "no llama-server\x1b[1m on the PATH [y]")
    for number, outcome in enumerate((EQUAL, NEAR_TIE, DIFFERS, NOT_CHECKED, FAULT)):
        yield Check(f"check {number}", outcome, "[/z]")
    yield from run(PP, 0, prefill_tps=1000.0, ttft_s=0.5)
    yield from run(PP_PEER, 0, prefill_tps=500.0, ttft_s=1.0)
    yield from run(PP_PEER, 1, prefill_tps=250.0, ttft_s=2.0)
    yield from run(PP, 1, prefill_tps=1500.0, ttft_s=0.25)
    yield from run(LONG, 0, longest_gap_s=0.1)
    yield from run(LONG_PEER, 0, longest_gap_s=0.4)
    yield from run(TG, 0, decode_tps=40.0, bandwidth_fraction=0.61)
    yield Skipped(TG_PEER, "it failed: OSError: [a]\x1b[0m")
    yield Begun(LONG, 1)


class Source:
    """Tells what it is given; `asked` is what it was asked to do."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self.asked: list[str] = []
        self.tell(*events)

    def tell(self, *events: Event) -> None:
        for event in events:
            self._events.put(event)

    def end(self) -> None:
        self._events.put(None)

    def events(self) -> Iterator[Event]:
        while (event := self._events.get()) is not None:
            yield event

    def drawn(self, begun: Begun) -> None:
        pass

    def interrupt(self) -> None:
        self.asked.append("interrupt")

    def kill(self) -> None:
        self.asked.append("kill")
