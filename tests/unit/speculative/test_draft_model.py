"""A second executor as the guesser: the fake one, whose tokens show what its cache really holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_mlx.backends.fake import FakeCodec, FakeExecutor, hashed
from ferrum_mlx.batch import RowSampling, UnifiedBatch
from ferrum_mlx.capacity import Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.executor import Submission
from ferrum_mlx.messages import Delta, Failed, Finished, Submit
from ferrum_mlx.model_info import Capabilities
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.draft_model import DraftModelProposer
from ferrum_mlx.speculative.speculation import Speculation

from .guessing import a_request

CONFIG = EngineConfig(block_size=4, max_model_len=512)
PROMPT = list(b"say something")


def an_executor(**settings: object) -> FakeExecutor:
    executor = FakeExecutor(replace(CONFIG, **settings))
    executor.prepare_startup()
    return executor


def target(request: Request, after: Sequence[int] = ()) -> int:
    """What a target that is the same fake would sample behind the request's tokens and `after`."""
    output = [*request.output, *after]
    sampling = RowSampling(
        params=request.params,
        seed=request.seed,
        sample_index=request.sample_index,
        position=len(output),
        prompt=request.prompt if request.params.looks_back else (),
        output=output if request.params.looks_back else (),
    )
    return hashed(request.prompt + output, sampling)


def expected(request: Request, count: int) -> list[int]:
    guesses: list[int] = []
    for _ in range(count):
        guesses.append(target(request, guesses))
    return guesses


PARAMS = [{}, {"temperature": 0.8}, {"temperature": 0.8, "presence_penalty": 0.5}]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalties"])
@given(rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), max_size=12))
def test_guesses_are_the_models_own_whatever_came_true(
    rounds: list[tuple[int, int, bool]], params: dict[str, float]
) -> None:
    """Rounds of (guesses wanted, how many come true, whether a surprise follows)."""
    executor = an_executor()
    proposer, request = DraftModelProposer(executor), a_request(PROMPT, **params)
    for wanted, right, surprise in rounds:
        guesses = proposer.propose({request: wanted})[request]
        assert guesses == expected(request, wanted)
        request.output += guesses[:right]
        request.output.append(65 if surprise else target(request))
    proposer.forget(request)
    assert executor.kv_capacity_snapshot().used_blocks == 0


def test_a_step_feeds_what_is_new_and_each_guess_but_the_last() -> None:
    executor = an_executor()
    proposer, request = DraftModelProposer(executor), a_request(PROMPT)
    proposer.propose({request: 4})
    for right in (4, 2, 0):
        guesses = expected(request, 4)
        request.output += guesses[:right]
        request.output.append(target(request) if right == 4 else 65)
        executor.batches.clear()
        proposer.propose({request: 4})
        rows = [batch.num_tokens for batch in executor.batches]
        assert rows == [2 if right == 4 else 1, 1, 1, 1]


def test_requests_are_drafted_for_together() -> None:
    executor = an_executor()
    proposer = DraftModelProposer(executor)
    requests = [a_request([i, *PROMPT], name=str(i)) for i in range(5)]
    wanted = {request: i + 1 for i, request in enumerate(requests)}
    guesses = proposer.propose(wanted)
    assert guesses == {request: expected(request, count) for request, count in wanted.items()}
    assert [len(batch.items) for batch in executor.batches] == [5, 4, 3, 2, 1]


class Slow(FakeExecutor):
    """Of which a step should take few prompt tokens while others decode."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), prefill_while_decoding=8)


def test_a_long_prompt_is_caught_up_with_a_few_tokens_a_step() -> None:
    executor = Slow(CONFIG)
    proposer = DraftModelProposer(executor)
    running, new = a_request(PROMPT[:4], name="running"), a_request(PROMPT * 3, name="new")
    while not proposer.propose({running: 2}).get(running):
        pass
    rounds = 0
    while not (guesses := proposer.propose({running: 2, new: 3}).get(new)):
        rounds += 1
        assert proposer.propose({running: 2})[running] == expected(running, 2)
    assert guesses == expected(new, 3)
    assert rounds == len(new.prompt) // 8
    assert max(batch.num_tokens for batch in executor.batches) <= 8 + 2


def test_whoever_finds_no_room_gets_none_and_takes_none() -> None:
    executor = an_executor(kv_memory=8 * 4 * 4)  # 8 blocks of 4 tokens
    proposer = DraftModelProposer(executor)
    first, second = a_request(range(20), name="first"), a_request(range(50, 70), name="second")
    both = proposer.propose({first: 3, second: 3})
    assert both.get(first) == expected(first, 3)
    assert not both.get(second)
    first.output += expected(first, 3) * 4  # it grows until its own pool is full
    assert not proposer.propose({first: 3, second: 3}).get(first)
    proposer.forget(first)
    assert proposer.propose({second: 3})[second] == expected(second, 3)


def test_a_request_beyond_the_draft_models_context_goes_without() -> None:
    executor = an_executor(max_model_len=20)
    proposer = DraftModelProposer(executor)
    long, short = a_request(range(30), name="long"), a_request(range(15), name="short")
    guesses = proposer.propose({long: 4, short: 4})
    assert not guesses.get(long)
    assert guesses[short] == expected(short, 4)
    short.output += guesses[short][:3]
    assert proposer.propose({short: 4})[short] == expected(short, 2)  # the last guess is never fed
    short.output += [1, 2, 3]
    assert not proposer.propose({short: 4}).get(short)


class Refusing(FakeExecutor):
    """Answers a submission with whatever stands in `answers` first."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.answers: list[Submission] = []

    def _launch(self, batch: UnifiedBatch) -> Submission:
        return self.answers.pop(0) if self.answers else super()._launch(batch)


@pytest.mark.parametrize("answer", [Deferred(3), NotSubmitted(FerrumError("no"), (1,))])
def test_a_step_that_is_put_off_gives_no_guesses_and_the_next_one_does(answer: Submission) -> None:
    executor = Refusing(CONFIG)
    proposer, request = DraftModelProposer(executor), a_request(PROMPT)
    executor.answers = [answer]
    assert not proposer.propose({request: 3}).get(request)
    assert proposer.propose({request: 3})[request] == expected(request, 3)


def test_a_block_that_others_have_found_is_left_to_them() -> None:
    """Guesses that another request really says stand in a block with a key, which nobody may cut."""
    executor = an_executor()
    proposer = DraftModelProposer(executor)
    wrong, right = a_request(PROMPT, name="wrong"), a_request(PROMPT, name="right")
    right.output += proposer.propose({wrong: 12})[wrong]
    assert proposer.propose({right: 2})[right] == expected(right, 2)
    wrong.output.append(65)
    assert not proposer.propose({wrong: 2}).get(wrong)
    assert proposer.propose({wrong: 2})[wrong] == expected(wrong, 2)
    assert proposer.propose({right: 2})[right] == expected(right, 2)


# In an engine


@pytest.mark.parametrize("blocks", [200, 24], ids=["plenty", "preempting"])
def test_a_draft_model_that_is_the_target_is_right_always(blocks: int) -> None:
    config = replace(CONFIG, kv_memory=blocks * 4 * 4, max_num_seqs=4)
    params = SamplingParams(max_tokens=80, temperature=0.8, top_p=0.9, ignore_eos=True, seed=5)
    outputs, ends = {}, {}
    for kind in ("plain", "drafting"):
        proposer = DraftModelProposer(an_executor(max_num_seqs=4))
        speculation = Speculation(proposer, name="draft", max_drafts=5)
        speculation._length.choose = (  # type: ignore[method-assign] - whatever the clock says
            lambda limits, *_, **__: {request: limit for request, (limit, _) in limits.items() if limit > 0}
        )
        executor = FakeExecutor(config)
        executor.prepare_startup()
        engine = Engine(
            executor,
            FakeCodec(),
            config,
            backend="fake",
            backend_reason="",
            speculation=speculation if kind == "drafting" else None,
        )
        for i in range(3):
            engine.submit(Submit(str(i), f"prompt {i}", params))
        ids: dict[str, list[int]] = {str(i): [] for i in range(3)}
        while engine.has_work():
            for event in engine.step():
                assert not isinstance(event, Failed)
                if isinstance(event, Delta):
                    ids[event.request_id] += event.token_ids
                elif isinstance(event, Finished):
                    ends[kind, event.request_id] = event.stats
        outputs[kind] = ids
        assert executor.kv_capacity_snapshot().used_blocks == 0
        assert proposer._executor.kv_capacity_snapshot().used_blocks == 0
        engine.shutdown()
    assert outputs["drafting"] == outputs["plain"]
    stats = [ends["drafting", str(i)] for i in range(3)]
    assert all(each.drafted_tokens == each.accepted_tokens > 40 for each in stats)
    assert bool(sum(each.preemptions for each in stats)) is (blocks < 60)
