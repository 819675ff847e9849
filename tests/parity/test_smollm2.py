"""The default model, greedy: our ids are mlx-lm's own, alone, and all prompts at once."""

from __future__ import annotations

import pytest

from ferrum_mlx.backends.mlx.build import build_executor
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Event, Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer

from . import golden, nearties

GREEDY = SamplingParams(max_tokens=golden.NEW_TOKENS, ignore_eos=True)
SETTINGS = [(8, 7), (16, 64), (32, 512)]  # block_size, max_prefill_chunk


@pytest.fixture(scope="module")
def codec(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


def make(resolved: ResolvedModel, block_size: int, chunk: int, numerics: str = "fast") -> MLXExecutor:
    config = EngineConfig(
        block_size=block_size, max_prefill_chunk=chunk, max_model_len=512, numerics=numerics, device="cpu"
    )
    return build_executor(resolved, config, lambda what: None)[0]


def engine_of(executor: MLXExecutor, codec: Tokenizer, block_size: int, chunk: int) -> Engine:
    config = EngineConfig(block_size=block_size, max_prefill_chunk=chunk, max_model_len=512)
    return Engine(executor, codec, config, backend="mlx", backend_reason="test")


def ids_of(events: list[Event], count: int) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(count)]
    for event in events:
        if isinstance(event, Delta):
            ids[int(event.request_id)] += event.token_ids
    return ids


def check(
    executor: MLXExecutor, outputs: list[list[int]], prompts: list[list[int]], golden_ids: list[list[int]]
) -> None:
    """Against mlx-lm's ids; its logits are those of the same class without our cache or attention."""
    dense = lambda known: executor.forward(known)[-1]  # noqa: E731
    found = [
        nearties.compare(prompt, ours, theirs, dense, dense)
        for prompt, ours, theirs in zip(prompts, outputs, golden_ids, strict=True)
    ]
    assert nearties.faults(found) == []
    assert executor.kv_capacity_snapshot().used_blocks == 0


def together(executor: MLXExecutor, codec: Tokenizer, block_size: int, chunk: int) -> None:
    """All ten at once, each entering three steps after the one before."""
    prompts = golden.stored()["prompts"]
    engine, events = engine_of(executor, codec, block_size, chunk), []
    for i, prompt in enumerate(prompts):
        engine.submit(Submit(str(i), prompt, GREEDY))
        for _ in range(3):
            events += engine.step()
    while engine.has_work():
        events += engine.step()
    check(executor, ids_of(events, len(prompts)), prompts, golden.stored()["outputs"])


def test_the_golden_prompts_are_the_template_s(codec: Tokenizer) -> None:
    made = [codec.encode_chat([{"role": "user", "content": prompt}]) for prompt in golden.PROMPTS]
    assert made == golden.stored()["prompts"]
    assert {len(ids) for ids in golden.stored()["outputs"]} == {golden.NEW_TOKENS}


SOME, OTHERS = slice(0, 3), slice(3, None)  # a prompt alone takes five times what it takes among ten


@pytest.mark.parametrize("part", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_alone(smollm2: ResolvedModel, codec: Tokenizer, part: slice) -> None:
    executor = make(smollm2, 16, 64)
    prompts, outputs = golden.stored()["prompts"][part], []
    for prompt in prompts:
        engine, events = engine_of(executor, codec, 16, 64), []
        engine.submit(Submit("0", prompt, GREEDY))
        while engine.has_work():
            events += engine.step()
        outputs += ids_of(events, 1)
    check(executor, outputs, prompts, golden.stored()["outputs"][part])


@pytest.mark.parametrize(("block_size", "chunk"), SETTINGS)
def test_ten_at_once(smollm2: ResolvedModel, codec: Tokenizer, block_size: int, chunk: int) -> None:
    together(make(smollm2, block_size, chunk), codec, block_size, chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "chunk"), SETTINGS)
def test_ten_at_once_with_exact_numerics(
    smollm2: ResolvedModel, codec: Tokenizer, block_size: int, chunk: int
) -> None:
    together(make(smollm2, block_size, chunk, "exact"), codec, block_size, chunk)


def test_a_shifted_block_is_seen(
    smollm2: ResolvedModel, codec: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a first block read from the second's place changes the ids."""
    executor = make(smollm2, 16, 64)
    true = executor.kv.block_table

    def shifted(cache_id: int, group: int) -> list[int]:
        table = true(cache_id, group)
        return [table[1], *table[1:]] if len(table) > 4 else table  # the first 64 tokens are written by then

    monkeypatch.setattr(executor.kv, "block_table", shifted)
    engine, events = engine_of(executor, codec, 16, 64), []
    engine.submit(Submit("0", golden.stored()["prompts"][1], GREEDY))
    while engine.has_work():
        events += engine.step()
    assert ids_of(events, 1)[0] != golden.stored()["outputs"][1]


@pytest.mark.slow
def test_the_golden_ids_are_mlx_lm_s(smollm2: ResolvedModel) -> None:
    made = golden.reference(smollm2, [0, 3])
    stored = golden.stored()
    assert made["outputs"] == [stored["outputs"][i] for i in (0, 3)]
