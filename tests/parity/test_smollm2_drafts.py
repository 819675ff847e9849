"""The default model with drafts, ten prompts at once: the ids are those without."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.ngram import NgramProposer
from ferrum_mlx.speculative.speculation import Speculation
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer
from ferrum_mlx.verify.guesses import Guesses, spoiled

from . import golden, nearties

# In float32 on both.
BACKENDS: dict[str, dict[str, bool]] = {"mlx": {}} | (
    {"torch": {"packed": False}} if find_spec("torch") else {}
)
CONFIG = EngineConfig(max_model_len=512, device="cpu", prefix_cache=False)
LONG = 128


@pytest.fixture(scope="module")
def codec(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module", params=BACKENDS)
def executor(request: pytest.FixtureRequest, smollm2: ResolvedModel) -> PagedExecutor:
    build = import_module(f"ferrum_mlx.backends.{request.param}.build")
    return build.build_executor(smollm2, CONFIG, lambda what: None, **BACKENDS[request.param])[0]


def outputs(
    executor: PagedExecutor, codec: Tokenizer, count: int, speculation: Speculation | None
) -> list[list[int]]:
    engine = Engine(executor, codec, CONFIG, backend="test", backend_reason="test", speculation=speculation)
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    ids: list[list[int]] = [[] for _ in golden.PROMPTS]
    for i, prompt in enumerate(golden.stored()["prompts"]):
        engine.submit(Submit(str(i), prompt, params))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Delta):
                ids[int(event.request_id)] += event.token_ids
    assert executor.kv_capacity_snapshot().used_blocks == 0
    return ids


def faults(executor: PagedExecutor, ours: list[list[int]], theirs: list[list[int]]) -> list[str]:
    def dense(known: list[int]):
        return executor.forward(known)[-1]

    cases = zip(golden.stored()["prompts"], ours, theirs, strict=True)
    return nearties.faults([nearties.compare(prompt, a, b, dense, dense) for prompt, a, b in cases])


def test_given_drafts(executor: PagedExecutor, codec: Tokenizer) -> None:
    """Against mlx-lm's ids, of which the drafts are made: every third one is wrong."""
    wanted = golden.stored()["outputs"]
    answers = {str(i): ids for i, ids in enumerate(wanted)}
    drafts = Guesses(spoiled(answers, executor.info.vocab_size))
    assert faults(executor, outputs(executor, codec, golden.NEW_TOKENS, drafts), wanted) == []
    assert drafts.stats().drafted > drafts.stats().accepted > 300


@pytest.mark.slow
def test_ngram(executor: PagedExecutor, codec: Tokenizer) -> None:
    """128 tokens, as far as the policy drafts at all, and then with every guess there is."""
    plain = outputs(executor, codec, LONG, None)
    policy = Speculation(NgramProposer(), name="ngram", max_drafts=8)
    assert faults(executor, outputs(executor, codec, LONG, policy), plain) == []
    proposer = NgramProposer()
    always = Guesses(lambda request, room: proposer.propose({request: room}).get(request, []))
    assert faults(executor, outputs(executor, codec, LONG, always), plain) == []
    print(policy.stats(), always.stats())
    assert always.stats().drafted > always.stats().accepted > 100
