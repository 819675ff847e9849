"""Pool, scheduler and engine under random operations: no leak, no starvation, every output right."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor, hashed
from ferrum_mlx.batch import RowSampling
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.kv.block_pool import NULL_BLOCK
from ferrum_mlx.messages import Delta, Failed, Finished, Submit
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.guesses import Guess, Guesses


def make(
    *, stateful: bool, blocks: int, ahead: bool = False, guesses: Guesses | None = None, **fields: int
) -> Engine:
    config = EngineConfig(block_size=4, max_model_len=60, kv_memory=blocks * 16, **fields)
    executor = FakeExecutor(config, stateful=stateful, one_step_ahead=ahead)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="fake", backend_reason="test", speculation=guesses)


class Moody(Guesses):
    """Drafts at times, so that verifies and steps ahead take turns."""

    def __init__(self, guess: Guess, rng: random.Random) -> None:
        super().__init__(guess)
        self._rng, self._wanted = rng, True

    def wants(self, requests: Sequence[Request]) -> bool:
        self._wanted = self._rng.random() < 0.5
        return self._wanted and super().wants(requests)

    def propose(self, requests: Sequence[Request], budget: int) -> None:
        super().propose(requests, budget if self._wanted else 0)


def guesses_of(seed: int) -> Guesses:
    """Right more often than not, of any length."""
    rng = random.Random(seed)

    def guess(request: Request, room: int) -> list[int]:
        right = expected([*request.prompt, *request.output], request.params, room, len(request.output))
        return [token if rng.random() < 0.8 else 120 for token in right[: rng.randint(0, 8)]]

    return Moody(guess, rng)


def expected(prompt: list[int], params: SamplingParams, count: int, first: int = 0) -> list[int]:
    """What the fake says to a prompt by itself, from output position `first` on.

    It is a pure function of the tokens and the noise.
    """
    known = list(prompt)
    for position in range(first, first + count):
        known.append(hashed(known, RowSampling(params=params, seed=params.seed or 0, position=position)))
    return known[len(prompt) :]


def check_references(engine: Engine) -> None:
    """Every block's references are the tables that name it, and each table belongs to a running request."""
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    running = {request.cache_id for request in engine._scheduler.running} | executor._leaving
    assert set(executor.kv._sequences) == running
    named = [b for seq in executor.kv._sequences.values() for b in seq.tables[0] if b != NULL_BLOCK]
    for block, state in enumerate(executor.kv_map().blocks[0], 1):
        assert named.count(block) == max(state, 0)
    slots = [seq.state for seq in executor.kv._sequences.values() if seq.state]
    assert len(set(slots)) == len(slots)
    assert sum(executor.kv.prefix._coming.values()) == sum(
        len(seq.announced) for seq in executor.kv._sequences.values()
    )


class Machine(RuleBasedStateMachine):
    """Add, step, cancel, preempt, evict and finish, in any order."""

    stateful = ahead = drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = make(
            stateful=self.stateful,
            blocks=20,
            ahead=self.ahead,
            guesses=guesses_of(1) if self.drafts else None,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            max_prefill_chunk=7,
        )
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.idle: dict[str, int] = {}  # steps since a request's last token

    @rule(
        prompt=st.lists(st.integers(97, 98), min_size=1, max_size=40),
        length=st.integers(1, 20),
        priority=st.integers(0, 2),
        hot=st.booleans(),
        looks_back=st.booleans(),
    )
    def add(self, prompt: list[int], length: int, priority: int, hot: bool, looks_back: bool) -> None:
        name = f"r{len(self.asked)}"
        params = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            temperature=float(hot),
            seed=len(self.asked),
            bad_words=("never",) if looks_back else (),
        )
        self.asked[name], self.ids[name] = (prompt, params), []
        self.engine.submit(Submit(name, prompt, params, priority=priority))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take()

    @precondition(lambda self: self.engine._streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine._streams))))

    @precondition(lambda self: self.engine._scheduler._running and not self.engine._launched)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.engine._scheduler._running))
        self.engine._scheduler._preempt([entry])

    @rule()
    def evict(self) -> None:
        self.engine.executor.kv.forget_prefixes()  # type: ignore[attr-defined]

    def take(self) -> None:
        for event in self.engine.step():
            if isinstance(event, Delta):
                self.ids[event.request_id] += event.token_ids
            elif isinstance(event, (Finished, Failed)):
                assert event.request_id not in self.ends
                self.ends[event.request_id] = getattr(event, "finish_reason", "error")

    @invariant()
    def references_add_up(self) -> None:
        check_references(self.engine)

    @invariant()
    def outputs_are_right_so_far(self) -> None:
        for name, ids in self.ids.items():
            assert ids == expected(*self.asked[name], len(ids))
            if self.ends.get(name) == "length":
                assert len(ids) == self.asked[name][1].max_tokens

    def teardown(self) -> None:
        """Everyone gets to the end, however many there are: no starvation, no leak."""
        for _ in range(2000):
            if not self.engine.has_work():
                break
            self.take()
        assert not self.engine.has_work()
        self.outputs_are_right_so_far()
        assert set(self.ends) == set(self.asked)
        assert not set(self.ends.values()) - {"length", "abort"}
        assert self.engine.executor.kv_capacity_snapshot().used_blocks == 0


class StatefulMachine(Machine):
    """The same with a state that cannot be rolled back, and snapshots of it."""

    stateful = True


class AheadMachine(Machine):
    """The same, a step always in flight."""

    ahead = True


class DraftingMachine(Machine):
    """The same with drafts, of which some are right, and a step ahead while none are wanted."""

    ahead = drafts = True


SETTINGS = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
TestMachine.settings = SETTINGS
TestStatefulMachine = StatefulMachine.TestCase
TestStatefulMachine.settings = SETTINGS
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = SETTINGS
TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = SETTINGS


@pytest.mark.parametrize("kind", ["plain", "stateful", "ahead", "drafts"])
def test_a_soak_of_2000_requests_with_cancels_leaves_nothing(kind: str) -> None:
    rng = random.Random(7)
    guesses = guesses_of(2) if kind == "drafts" else None
    engine = make(
        stateful=kind == "stateful",
        ahead=kind == "ahead",
        guesses=guesses,
        blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    sizes, ended = [], 0
    for i in range(2000):
        prompt = [97] * rng.randint(1, 12) + [rng.randrange(97, 123) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(max_tokens=rng.randint(1, 24), temperature=1.0, seed=i)
        engine.submit(Submit(f"r{i}", prompt, params, priority=rng.randint(0, 2)))
        for _ in range(rng.randint(0, 6)):
            ended += _ends(engine)
        if rng.random() < 0.3 and engine._streams:
            engine.abort(rng.choice(sorted(engine._streams)))
        if i % 500 == 499:
            while engine.has_work():
                ended += _ends(engine)
            gc.collect()
            sizes.append(sys.getallocatedblocks())
    assert ended == 2000
    assert engine.executor.kv_capacity_snapshot().used_blocks == 0
    check_references(engine)
    assert isinstance(engine.executor, FakeExecutor)
    assert not engine.executor._probed
    assert engine._scheduler.preemptions > 20
    assert engine.executor.cache_metrics().hits > 500
    assert guesses is None or guesses.stats().accepted > 1000
    assert sizes[-1] < sizes[1] + 2000, sizes  # flat once the caches are warm: less than one object a request


def _ends(engine: Engine) -> int:
    return sum(isinstance(event, (Finished, Failed)) for event in engine.step())
