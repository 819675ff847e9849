"""Order, repetitions, warm-up, and what becomes of peers that fail."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ferrum_mlx.bench import workloads
from ferrum_mlx.bench.checks import DIFFERS, EQUAL, FAULT, NOT_CHECKED, Check
from ferrum_mlx.bench.ours import Ours
from ferrum_mlx.bench.progress import Begun, Kept, Row, Skipped
from ferrum_mlx.bench.runner import PLAIN, Results, Runner
from ferrum_mlx.bench.workloads import PAIRS, Case
from ferrum_mlx.errors import FerrumError

from .bench_systems import Script, slow_subject

PP, TG = workloads.prefill(20, 0, 1), workloads.decode(4, 0, 1, 512)


def runner(
    monkeypatch: pytest.MonkeyPatch, cases: Sequence[Case], reps: int = 2, **settings: Any
) -> tuple[Runner, list[tuple[str, str]]]:
    """It writes down who runs what."""
    log: list[tuple[str, str]] = []
    run = Ours.run

    def logged(self: Ours, case: Case, arrivals: Any) -> Any:
        log.append((self.name, case.name))
        return run(self, case, arrivals)

    monkeypatch.setattr(Ours, "run", logged)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # the tests' own heap is large
    subject = slow_subject(monkeypatch, **settings)
    return Runner(Ours(subject, subject.config), cases, reps, 0, say=lambda what: None), log


def test_every_other_repetition_goes_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [PP, TG], reps=3)
    bench.peers = [Script("peer", log)]
    bench.measure()
    there = [("ferrum-mlx", "pp20"), ("peer", "pp20"), ("ferrum-mlx", "tg4"), ("peer", "tg4")]
    assert log == [*there, *reversed(there), *there]
    assert {key: list(runs) for key, runs in bench.results.runs.items()} == {
        (case.name, 1, name): [0, 1, 2] for case in (PP, TG) for name in ("ferrum-mlx", "peer")
    }


def test_both_sides_of_a_pair_get_the_same_prompts_and_each_pair_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, log = runner(monkeypatch, [TG])
    seen: dict[str, list[list[int]]] = {"one": [], "two": []}

    def keep(name: str) -> Any:
        def ids(arrival: Any) -> range:
            seen[name].append(list(arrival.prompt))
            return range(arrival.max_tokens)

        return ids

    bench.peers = [Script(name, log, ids=keep(name)) for name in seen]
    bench.measure()
    assert seen["one"] == seen["two"]
    assert seen["one"][0] != seen["one"][1]


def test_a_warm_up_is_short_and_leaves_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [workloads.decode(100, 0, 1, 512)])
    tokens: list[int] = []
    bench.peers = [Script("peer", log, ids=lambda a: tokens.append(a.max_tokens) or range(a.max_tokens))]
    bench.warm_up(peers=False)
    assert log == [("ferrum-mlx", "tg100")]
    bench.warm_up(peers=True)
    assert (log[1:], tokens) == ([("peer", "tg100")], [4])
    assert bench.results.runs == {}


def test_a_peer_that_fails_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [PP])
    bench.peers = [
        Script("broken", log, error=ValueError("no such op")),
        Script("picky", log, refuses="never"),
    ]
    bench.measure()
    assert bench.results.skipped == {
        ("pp20", 1, "broken"): "it failed: ValueError: no such op",
        ("pp20", 1, "picky"): "never",
    }
    assert log == [("ferrum-mlx", "pp20"), ("broken", "pp20"), ("ferrum-mlx", "pp20")]
    assert list(bench.results.runs) == [("pp20", 1, "ferrum-mlx")]


def test_our_own_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = runner(monkeypatch, [workloads.prefill(100, 0, 1)], max_model_len=64)
    with pytest.raises(FerrumError, match="1 to 63 at this context"):
        bench.measure()


def short(name: str) -> Case:
    case = workloads.of_texts(name, 6)
    return replace(case, texts=tuple(text[:40] for text in case.texts))


def test_speculation_runs_beside_none_in_at_least_ten_pairs_of_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [short("chat"), short("edit"), PP], speculative="ngram")
    bench.measure()
    counts = {key[0::2]: len(runs) for key, runs in bench.results.runs.items()}
    assert counts == {
        ("chat", "ferrum-mlx"): PAIRS,
        ("chat", PLAIN): PAIRS,
        ("edit", "ferrum-mlx"): 2,
        ("edit", PLAIN): 2,
        ("pp20", "ferrum-mlx"): 2,  # a prompt is not speculated on
    }
    chats = [name for name, case in log if case == "chat"]
    assert chats[:4] == ["ferrum-mlx", PLAIN, PLAIN, "ferrum-mlx"]


def test_without_speculation_a_chat_is_a_case_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [short("chat")])
    bench.measure()
    assert log == [("ferrum-mlx", "chat")] * 2
    assert [check.outcome for check in bench.results.checks.values()] == [EQUAL]


def test_other_ids_than_the_plain_run_s_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = runner(monkeypatch, [short("edit")])
    true = bench.ours.subject.executor.script  # type: ignore[attr-defined]
    bench.warm_up(peers=False)
    bench.ours.subject.executor.script = lambda tokens, row: (true(tokens, row) + 1) % 250  # type: ignore[attr-defined]
    bench.measure()
    (check,) = bench.results.faults
    assert check.name.startswith("edit: ids again")


@pytest.mark.parametrize(("same_weights", "outcome"), [(True, FAULT), (False, DIFFERS)])
def test_a_peer_on_our_weights_must_say_what_we_say(
    monkeypatch: pytest.MonkeyPatch, same_weights: bool, outcome: str
) -> None:
    bench, log = runner(monkeypatch, [PP])
    params = {"same_weights": same_weights}
    bench.peers = [Script("right", log, **params), Script("wrong", log, ids=lambda a: [0, 1, 9], **params)]
    bench.check_peers([70, 71], [0, 1, 2])
    found = {name.split()[-1]: check.outcome for name, check in bench.results.checks.items()}
    assert found == {"right": EQUAL, "wrong": outcome}


def test_a_peer_that_tells_no_ids_or_fails_the_check_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, log = runner(monkeypatch, [PP])
    bench.peers = [Script("text", log, ids=lambda a: []), Script("broken", log, error=OSError("gone"))]
    bench.check_peers([70, 71], [0, 1, 2])
    found = [(check.outcome, check.detail) for check in bench.results.checks.values()]
    assert found == [
        (NOT_CHECKED, "it tells text, and no ids"),
        (NOT_CHECKED, "it failed: OSError: gone"),
    ]
    assert not bench.results.faults


def test_of_checks_of_one_name_the_worst_stays() -> None:
    results = Results()
    for outcome in (EQUAL, FAULT, EQUAL, "near-tie"):
        results.note(Check("ids", outcome))
    assert [check.outcome for check in results.faults] == [FAULT]


def test_what_makes_no_figures_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one request: the second stream begins when the first has ended."""
    bench, _ = runner(monkeypatch, [workloads.decode(8, 100, 2, 512)], kv_memory=4 * 128)
    bench.measure()
    assert "only 1 of 2 streams" in bench.results.skipped["tg8 @ d100", 2, "ferrum-mlx"]


def test_what_is_told_is_what_is_kept_and_never_while_a_run_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, log = runner(monkeypatch, [PP, short("edit")])
    told: list[Any] = []
    run = Runner._run

    def silent(self: Runner, *args: Any) -> Any:
        before = len(told)
        trace = run(self, *args)
        assert [type(event) for event in told[before:]] in ([], [Skipped])  # a peer that failed
        return trace

    monkeypatch.setattr(Runner, "_run", silent)
    bench.tell = told.append
    bench.peers = [Script("peer", log), Script("broken", log, error=OSError("gone"))]
    bench.measure()
    runs = {(event.key, event.rep): event.figures for event in told if isinstance(event, Kept)}
    kept = {
        (key, rep): figures for key, by_rep in bench.results.runs.items() for rep, figures in by_rep.items()
    }
    assert runs == kept
    assert len(kept) == 8  # two cases, two systems, two repetitions
    assert {event.key: event.why for event in told if isinstance(event, Skipped)} == bench.results.skipped
    assert [event for event in told if isinstance(event, Check)] == [
        Check("edit: ids again = without speculation", EQUAL)
    ] * 2
    begun = [(event.key, event.rep) for event in told if isinstance(event, Begun)]
    assert set(begun) - set(runs) == {((case, 1, "broken"), 0) for case in ("pp20", "edit")}
    assert bench.plan().rows[:2] == (
        Row(("pp20", 1, "ferrum-mlx"), "", "prefill_tps", 2),
        Row(("pp20", 1, "peer"), "by script", "prefill_tps", 2),
    )
