"""mlx-lm as a peer: on the very model of our backend, it says what we say; its attention through numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ferrum_mlx.bench import workloads
from ferrum_mlx.bench.ours import Ours
from ferrum_mlx.bench.peers import Setting
from ferrum_mlx.bench.peers_mlx import MLXLM, attend, blas_attention, mlx_lm_peer
from ferrum_mlx.bench.workloads import Arrival, Case
from ferrum_mlx.verify.runs import Subject

from ..unit.verify_subjects import subject

LOAD = Case("load", "load", 3, 60)
PROMPTS = [Arrival("one", list(range(70, 75)), 6), Arrival("two", list(range(80, 97)), 6)]
LATER = [*PROMPTS, Arrival("three", [100, 101], 6, after=5)]


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return subject("mlx-host")


@pytest.fixture(scope="module")
def peer(tiny: Subject) -> MLXLM:
    return mlx_lm_peer(Setting(tiny, tiny.config, [LOAD]))


def test_it_runs_the_very_model_through_the_same_blas(tiny: Subject, peer: MLXLM) -> None:
    assert peer._model is tiny.executor.model  # type: ignore[attr-defined]
    assert (peer._blas, peer.same_weights) == (True, True)


def test_several_streams_say_what_ours_say(tiny: Subject, peer: MLXLM) -> None:
    theirs = peer.run(LOAD, LATER)
    ours = Ours(tiny, tiny.config).run(LOAD, LATER)
    assert peer.method(LOAD) == "BatchGenerator"
    assert {s.name: s.ids for s in theirs.streams} == {s.name: s.ids for s in ours.streams}
    assert all(s.ended and len(s.times) == 6 for s in theirs.streams)
    third = theirs.streams[2]
    assert third.arrived >= sorted(time for s in theirs.streams[:2] for time in s.times)[4]


def test_one_stream_says_what_ours_says(tiny: Subject, peer: MLXLM) -> None:
    case = workloads.multi_turn(turns=2, opening=12, prompt=4, tokens=5)
    arrivals = case.make("0", 258)
    theirs, ours = peer.run(case, arrivals), Ours(tiny, tiny.config).run(case, arrivals)
    assert peer.method(case) == "generate"
    assert [s.ids for s in theirs.streams] == [s.ids for s in ours.streams]
    assert len(theirs.streams[1].prompt) == 12 + 5 + 4


def test_it_stops_with_the_first_that_ends(peer: MLXLM) -> None:
    run = peer.run(workloads.admission(2, 20), [Arrival("a", [70], 4), Arrival("b", [71], 30)])
    first, second = run.streams
    assert (first.ended, second.ended) == (True, False)
    assert len(second.ids) < 30


def test_a_depth_is_not_for_it(peer: MLXLM) -> None:
    assert peer.refusal(workloads.prefill(8, 8, 1))
    assert not peer.refusal(workloads.decode(8, 8, 2, 512))


Mask = Callable[[], "np.ndarray | str | None"]


@pytest.mark.parametrize(
    "mask",
    [
        lambda: None,
        lambda: "causal",
        lambda: np.tril(np.ones((5, 9), bool), 4),
        lambda: np.where(np.tril(np.ones((5, 9), bool), 4), 0, -1e9).astype(np.float32),
        lambda: (
            np.tril(np.ones((5, 9), bool), 4)[None, None]
            & (np.arange(9) > np.array([[0], [2]]))[:, None, None]
        ),
        lambda: np.random.default_rng(3).random((2, 4, 5, 9)) < 0.7,
    ],
    ids=["none", "causal", "bool", "added", "by sequence", "by head"],
)
def test_attention_through_numpy_is_mlx_s_own(mask: Mask) -> None:
    import mlx.core as mx

    rng = np.random.default_rng(0)
    queries = rng.standard_normal((2, 4, 5, 8), dtype=np.float32)
    keys, values = rng.standard_normal((2, 2, 2, 9, 8), dtype=np.float32)
    wanted = mask()
    array = wanted if wanted is None or isinstance(wanted, str) else mx.array(wanted)
    own = mx.fast.scaled_dot_product_attention(
        mx.array(queries), mx.array(keys), mx.array(values), scale=0.3, mask=array
    )
    found = attend(queries * np.float32(0.3), keys, values, wanted)
    np.testing.assert_allclose(found, np.array(own), atol=2e-6)


def test_the_route_is_there_while_it_runs_and_gone_after() -> None:
    import mlx_lm.models.base as base
    import mlx_lm.models.llama as llama

    before = base.scaled_dot_product_attention, llama.scaled_dot_product_attention
    with blas_attention():
        assert llama.scaled_dot_product_attention is not before[1]
    assert (base.scaled_dot_product_attention, llama.scaled_dot_product_attention) == before
