"""Runs every case on every system, in an order that favours none, and keeps the figures.

A repetition goes through all cases, and in each through all systems; the next one goes through both
backwards. So drift of the machine hits all alike, and a ratio is always taken within one repetition.
What failed on a peer is named and left out; what fails on our side ends the benchmark.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ferrum_mlx.bench import checks
from ferrum_mlx.bench.ceiling import step_figures
from ferrum_mlx.bench.checks import FAULT, NOT_CHECKED, Check
from ferrum_mlx.bench.ours import Ours
from ferrum_mlx.bench.progress import Begun, Kept, Key, Planned, Row, Skipped, Tell, untold
from ferrum_mlx.bench.systems import System
from ferrum_mlx.bench.trace import Figures, Trace
from ferrum_mlx.bench.workloads import PAIRS, Arrival, Case
from ferrum_mlx.errors import FerrumError, one_line

PLAIN = "without speculation"
WARM_UP_TOKENS = 4
Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(slots=True)
class Results:
    """Figures by (case, system), then repetition. It is filled as they come, and complete at any time."""

    runs: dict[Key, dict[int, Figures]] = field(default_factory=dict)
    methods: dict[Key, str] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[Check]:
        return [check for check in self.checks.values() if check.outcome == FAULT]

    def note(self, check: Check) -> None:
        """The worst of several of one name stays."""
        known = self.checks.get(check.name)
        if known is None or (known.outcome != FAULT and check.outcome != checks.EQUAL):
            self.checks[check.name] = check


@dataclass(slots=True)
class Runner:
    """`ours` comes first in every comparison; `bandwidth` is in bytes a second, 0 while it is not known.

    `say` is given what is about to be done, `tell` what is planned, begun, kept or left out.
    """

    ours: Ours
    cases: Sequence[Case]
    reps: int
    seed: int
    say: Say
    tell: Tell = untold
    peers: Sequence[System] = ()
    bandwidth: float = 0.0
    results: Results = field(default_factory=Results)
    _answers: dict[tuple[str, int], tuple[list[int], list[int]]] = field(default_factory=dict)

    @property
    def plain(self) -> Ours | None:
        """This engine without the speculation that was asked for."""
        if self.ours.config.speculative == "off":
            return None
        config = replace(self.ours.config, speculative="off", draft_tokens=None)
        return replace(self.ours, config=config, name=PLAIN)

    def systems(self, case: Case) -> list[System]:
        plain = [self.plain] if self.plain and case.kind == "text" else []
        return [self.ours, *plain, *self.peers]

    def repetitions(self, case: Case) -> int:
        pairs = PAIRS if case.name == "chat" and self.plain else 1
        return max(self.reps, pairs)

    def plan(self) -> Planned:
        rows = [
            Row(_key(case, system), system.method(case), case.main, self.repetitions(case))
            for case in self.cases
            for system in self.systems(case)
        ]
        return Planned(self.ours.name, tuple(rows), self.reps, self.seed)

    def note(self, check: Check) -> None:
        self.results.note(check)
        self.tell(check)

    def check_peers(self, prompt: list[int], ids: list[int]) -> None:
        """Greedy ids of a short prompt, beside ours."""
        for peer in self.peers:
            self.note(self._check_peer(peer, f"greedy ids = those of {peer.name}", prompt, ids))

    def _check_peer(self, peer: System, name: str, prompt: list[int], ids: list[int]) -> Check:
        case = Case("check", "text", 1, len(prompt) + len(ids))
        try:
            theirs = peer.run(case, [Arrival("check", prompt, len(ids))]).streams[0].ids
        except Exception as error:  # a peer raises what it likes
            return Check(name, NOT_CHECKED, f"it failed: {one_line(error)}")
        if not theirs:
            return Check(name, NOT_CHECKED, "it tells text, and no ids")
        if peer.same_weights:
            return checks.same_ids(self.ours.subject, name, prompt, ids, theirs)
        return checks.first_difference(name, ids, theirs)

    def warm_up(self, *, peers: bool) -> None:
        """Every case once, with short answers, on the peers or on ours; nothing is kept."""
        for case in self.cases:
            for system in self.systems(case):
                if isinstance(system, Ours) is peers or self._refused(case, system):
                    continue
                self.say(f"warm-up: {_named(case, system)}")
                arrivals = [
                    replace(a, max_tokens=_warm_tokens(case, a)) for a in self._arrivals(case, "warm-up", 0)
                ]
                self._run(case, system, arrivals)

    def measure(self) -> None:
        most = max(self.repetitions(case) for case in self.cases)
        for rep in range(most):
            for case, system, arrivals in self._turns(rep):
                self.say(f"{rep + 1} of {self.repetitions(case)}: {_named(case, system)}")
                self.tell(Begun(_key(case, system), rep))
                run = self._run(case, system, arrivals)
                if run is not None:
                    self._keep(case, system, rep, run)

    def _turns(self, rep: int) -> Iterator[tuple[Case, System, list[Arrival]]]:
        for case in _alternating(self.cases, rep):
            if rep >= self.repetitions(case):
                continue
            arrivals = self._arrivals(case, str(rep), rep)
            for system in _alternating(self.systems(case), rep):
                if not self._refused(case, system):
                    yield case, system, arrivals

    def _arrivals(self, case: Case, label: str, rep: int) -> list[Arrival]:
        if not case.texts:
            vocab = self.ours.subject.executor.info.vocab_size
            return case.make(f"{self.seed} {case.name} {case.streams} {label}", vocab)
        prompt, answer = self._answer(case, rep % len(case.texts))
        return [Arrival("answer", prompt, len(answer))]

    def _answer(self, case: Case, number: int) -> tuple[list[int], list[int]]:
        """A text as a prompt, and the plain greedy answer up to its end: what all say, and how much."""
        if (case.name, number) not in self._answers:
            subject = self.ours.subject
            prompt = subject.codec.encode_chat([{"role": "user", "content": case.texts[number]}])
            self.say(f"the answer to {case.name} {number + 1}: how long it is")
            answer = (self.plain or self.ours).answer(case, prompt)
            self._answers[case.name, number] = prompt, answer
        return self._answers[case.name, number]

    def _refused(self, case: Case, system: System) -> bool:
        key = _key(case, system)
        if key not in self.results.skipped and (why := system.refusal(case)):
            self._skip(key, why)
        return key in self.results.skipped

    def _skip(self, key: Key, why: str) -> None:
        self.results.skipped[key] = why
        self.tell(Skipped(key, why))

    def _run(self, case: Case, system: System, arrivals: Sequence[Arrival]) -> Trace | None:
        gc.collect()  # what the run before has left is not this one's to clear
        if isinstance(system, Ours):
            return system.run(case, arrivals)
        try:
            return system.run(case, arrivals)
        except Exception as error:  # a peer raises what it likes
            self._skip(_key(case, system), f"it failed: {one_line(error)}")
            return None

    def _keep(self, case: Case, system: System, rep: int, run: Trace) -> None:
        key = _key(case, system)
        try:
            figures = case.figures(run)
        except FerrumError as error:
            self._skip(key, str(error))
            return
        if run.peak_memory_bytes:
            figures["peak_memory_bytes"] = float(run.peak_memory_bytes)
        if isinstance(system, Ours):
            if self.bandwidth and system.speculation is None:
                memory = system.subject.executor.memory()
                figures |= step_figures(case, memory, figures, self.bandwidth)
            if case.texts:
                self._check_ids(case, system, rep, run)
        self.results.methods[key] = system.method(case)
        self.results.runs.setdefault(key, {})[rep] = figures
        self.tell(Kept(key, rep, figures))

    def _check_ids(self, case: Case, system: Ours, rep: int, run: Trace) -> None:
        prompt, answer = self._answers[case.name, rep % len(case.texts)]
        name = f"{case.name}: ids {system.method(case) or 'again'} = without speculation"
        self.note(checks.same_ids(system.subject, name, prompt, run.streams[0].ids, answer))


def _key(case: Case, system: System) -> Key:
    return case.name, case.streams, system.name


def _alternating(items: Sequence[_T], rep: int) -> list[_T]:
    return list(items) if rep % 2 == 0 else list(reversed(items))


def _warm_tokens(case: Case, arrival: Arrival) -> int:
    """Short, but for those whose length says when others arrive."""
    return min(arrival.max_tokens, WARM_UP_TOKENS) if case.at_once else arrival.max_tokens


def _named(case: Case, system: System) -> str:
    streams = f" × {case.streams}" if case.streams > 1 else ""
    method = f" {system.method(case)}" if system.method(case) else ""
    return f"{case.name}{streams}, {system.name}{method}"
