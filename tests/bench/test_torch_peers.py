"""transformers as a peer: on the very model of our backend, it says what we say."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the torch backend is not installed")

from ferrum_mlx.bench import workloads
from ferrum_mlx.bench.ours import Ours
from ferrum_mlx.bench.peers import Setting
from ferrum_mlx.bench.peers_torch import Transformers, transformers_peer
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.verify.runs import Subject

from ..unit.verify_subjects import subject

ONE, TWO = Case("load", "load", 1, 60), Case("load", "load", 2, 60)
PROMPTS = [Arrival("one", list(range(70, 75)), 6), Arrival("two", list(range(80, 97)), 6)]


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return subject("torch")


@pytest.fixture(scope="module")
def peer(tiny: Subject) -> Transformers:
    return transformers_peer(Setting(tiny, tiny.config, [ONE, TWO]))


def test_one_stream_says_what_ours_says(tiny: Subject, peer: Transformers) -> None:
    theirs, ours = peer.run(ONE, PROMPTS[:1]), Ours(tiny, tiny.config).run(ONE, PROMPTS[:1])
    assert peer.method(ONE) == "generate"
    assert peer.same_weights
    assert theirs.streams[0].ids == ours.streams[0].ids
    assert len(theirs.streams[0].times) == 6


def test_weights_that_we_packed_are_not_its_own(tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded from the files, and its ids are told, not judged."""
    from ferrum_mlx.backends.torch import loader

    with tiny.executor.library_model() as model:  # type: ignore[attr-defined]
        monkeypatch.setattr(loader, "load_model", lambda resolved, device: (model, []))
    monkeypatch.setattr(Setting, "resolved", lambda self: None)
    monkeypatch.setattr(tiny.executor, "info", replace(tiny.executor.info, computes_in="bfloat16"))
    found = transformers_peer(Setting(tiny, tiny.config, [ONE]))
    assert not found.same_weights
    with found._model() as given:
        assert given is model


def test_what_it_cannot_do_is_said(peer: Transformers) -> None:
    assert "takes all requests at the start" in peer.refusal(workloads.staggered())
    assert peer.refusal(workloads.prefill(8, 8, 1))
    assert not peer.refusal(workloads.ragged())


@pytest.mark.slow  # it takes most of the machine's memory for its cache
def test_several_streams_say_what_ours_say(tiny: Subject, peer: Transformers) -> None:
    theirs, ours = peer.run(TWO, PROMPTS), Ours(tiny, tiny.config).run(TWO, PROMPTS)
    assert peer.method(TWO) == "generate_batch"
    assert [s.ids for s in theirs.streams] == [s.ids for s in ours.streams]
    assert all(len(s.times) == 6 and s.times[0] > s.arrived for s in theirs.streams)
