"""Recorded forwards give what the model gives, whatever the ids, or say why there are none."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import torch
from torch import nn

from ferrum_mlx.backends.torch import replay, weights
from ferrum_mlx.backends.torch.adapters import AdaptedLayers
from ferrum_mlx.backends.torch.attention import attend_running
from ferrum_mlx.backends.torch.recording import Call, ChangesInPlace, Name, Recorder, compiled
from ferrum_mlx.backends.torch.replay import Replays

VOCAB, WIDTH = 32, 64
Twist = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Attention, three layers of one input, and what a test puts between them."""

    def __init__(self, twist: Twist = lambda x, positions: x) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.twist = twist
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.twist(self.table(ids[None]), positions)
        turned = x * torch.cos(positions.float())[None, :, None]
        q, k, v = (
            layer(turned).view(1, len(ids), 4, 16).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = attend_running(q, k, v, 0.25, None, None).reshape(1, len(ids), WIDTH)
        logits: torch.Tensor = self.head(x + self.out(y))[0]
        return logits


def outcome(model: nn.Module, rows: int = 1) -> str | None:
    return Replays(model, model, AdaptedLayers(model, []))._record(rows)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_replay_is_the_forward(rows: int, pack: bool) -> None:
    model = Model()
    if pack:
        weights.pack(model)
    replays = Replays(model, model, AdaptedLayers(model, []))
    assert replays._record(rows) is None
    program = replays._programs[rows]
    assert program is not None
    ids, positions = torch.randint(VOCAB, (rows,)), torch.randint(100, (rows,))
    with replay._Recorded(None).entered(), torch.inference_mode():
        torch.testing.assert_close(program(ids, positions), model(ids, positions))


def test_layers_of_one_input_become_one_call() -> None:
    model = Model()
    recorder = Recorder(ids := torch.arange(1), positions := torch.arange(1), once=True)
    with (
        torch.inference_mode(),
        replay._Recorded(recorder).entered(),
        replay._whole(model, recorder),
        recorder,
    ):
        model(ids, positions)
    calls = replay._merge(recorder)
    assert [len(call.results) for call in calls if isinstance(call.function, replay._Side)] == [3]
    assert sum(isinstance(call.function, replay._Whole) for call in calls) == 2
    q, k, v = (layer.weight for layer in (model.q, model.k, model.v))
    assert replay._adjacent([q, k, v]) is not None  # and nothing is held twice
    assert replay._adjacent([q, v, k]) is None


@pytest.mark.parametrize(
    ("twist", "why"),
    [
        (lambda x, positions: x * float(positions.max()), "looks at values (aten::item)"),
        (lambda x, positions: x * sum(positions.tolist()), "a replayed step of 1 rows is off by"),
        (lambda x, positions: x[:, positions >= 0], "looks at values (aten::index"),
        (lambda x, positions: x * len(positions.nonzero()), "looks at values (aten::nonzero)"),
        (lambda x, positions: 1 / 0, "a step cannot be recorded: ZeroDivisionError"),
    ],
    ids=["item", "tolist", "mask", "nonzero", "fault"],
)
def test_what_cannot_be_replayed_is_said(twist: Any, why: str) -> None:
    reason = outcome(Model(twist))
    assert reason is not None
    assert why in reason


def test_changes_in_place_are_repeated() -> None:
    def twist(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        first, second = x * 2, x * 2
        first += positions[None, :, None]
        return first + second

    model = Model(twist)
    recorder = Recorder(ids := torch.arange(1), positions := torch.arange(1), once=True)
    with (
        replay._Recorded(recorder).entered(),
        torch.inference_mode(),
        pytest.raises(ChangesInPlace),
        recorder,
    ):
        model(ids, positions)
    assert outcome(model) is None


def test_what_a_model_keeps_may_not_change() -> None:
    seen = torch.zeros(1)
    reason = outcome(Model(lambda x, positions: x + seen.add_(1)))
    assert reason == "the model's forward changes what it keeps (aten::add_.Tensor)"


def test_a_value_is_dropped_behind_its_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        assert sum(ref() is not None for ref in alive) <= 1
        alive.append(weakref.ref(made := x + 1))
        return made

    names = [Name(f"v{i}") for i in range(5)]
    calls = [Call(make, (before,), {}, (after,)) for before, after in itertools.pairwise(names)]
    assert compiled(calls, names[:1], {}, names[-1])(torch.zeros(1)) == 4


def test_a_replayed_step_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Any:
        program = compiled(*given)
        return lambda ids, positions: program(ids, positions) * 1.01

    monkeypatch.setattr(replay, "compiled", wrong)
    assert "a replayed step of 1 rows is off by" in str(outcome(Model()))


class Normed(nn.Module):
    """A norm as models write it."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.ones(WIDTH) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("off", [True, False])
def test_compiled_idioms_that_are_off_are_left_out_and_said(
    off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_rows = pytest.importorskip("ferrum_mlx.backends.torch.cpu_rows", reason="numba is not installed")
    if off:
        monkeypatch.setattr(cpu_rows.Norm, "__call__", lambda norm, x, weight: x * 2)
    model = Model(Normed())
    replays = Replays(model, model, AdaptedLayers(model, []))
    assert replays._record(1) is None
    assert replays._record(2) is None
    assert ("is off by" in replays.uncompiled) is off
