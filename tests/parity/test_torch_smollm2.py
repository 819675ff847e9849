"""The default model on torch, greedy: mlx-lm's own ids, and transformers', alone and all prompts at once."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")


from ferrum_mlx.backends.torch.build import build_executor
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Event, Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.tokenizer import Tokenizer, load_tokenizer

from . import golden, nearties, torch_reference

GREEDY = SamplingParams(max_tokens=golden.NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def codec(smollm2: ResolvedModel) -> Tokenizer:
    return load_tokenizer(smollm2)


def make(resolved: ResolvedModel, codec: Tokenizer, block_size: int, chunk: int, numerics: str) -> Engine:
    config = EngineConfig(
        block_size=block_size, max_prefill_chunk=chunk, max_model_len=512, numerics=numerics, device="cpu"
    )
    executor, _, _ = build_executor(resolved, config, lambda what: None, packed=False)
    return Engine(executor, codec, config, backend="torch", backend_reason="test")


def run(engine: Engine, prompts: list[list[int]], apart: int) -> list[list[int]]:
    """Each prompt enters some steps after the one before."""
    events: list[Event] = []
    for i, prompt in enumerate(prompts):
        engine.submit(Submit(str(i), prompt, GREEDY))
        for _ in range(apart):
            events += engine.step()
    while engine.has_work():
        events += engine.step()
    ids: list[list[int]] = [[] for _ in prompts]
    for event in events:
        if isinstance(event, Delta):
            ids[int(event.request_id)] += event.token_ids
    return ids


def check(
    engine: Engine, prompts: list[list[int]], outputs: list[list[int]], wanted: list[list[int]]
) -> None:
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    dense = lambda known: executor.forward(known)[-1]  # noqa: E731
    found = [
        nearties.compare(prompt, ours, theirs, dense, dense)
        for prompt, ours, theirs in zip(prompts, outputs, wanted, strict=True)
    ]
    assert nearties.faults(found) == []
    assert executor.kv_capacity_snapshot().used_blocks == 0


@pytest.mark.parametrize(
    ("block_size", "chunk", "numerics"),
    [
        (16, 64, "fast"),
        pytest.param(8, 7, "fast", marks=pytest.mark.slow),
        pytest.param(32, 512, "fast", marks=pytest.mark.slow),
        pytest.param(16, 64, "exact", marks=pytest.mark.slow),
    ],
)
def test_ten_at_once(
    smollm2: ResolvedModel, codec: Tokenizer, block_size: int, chunk: int, numerics: str
) -> None:
    stored = golden.stored()
    engine = make(smollm2, codec, block_size, chunk, numerics)
    check(engine, stored["prompts"], run(engine, stored["prompts"], 3), stored["outputs"])


def alone(resolved: ResolvedModel, codec: Tokenizer, indices: list[int]) -> None:
    stored = golden.stored()
    engine = make(resolved, codec, 16, 64, "fast")
    prompts = [stored["prompts"][i] for i in indices]
    outputs = [run(engine, [prompt], 0)[0] for prompt in prompts]
    check(engine, prompts, outputs, [stored["outputs"][i] for i in indices])


def test_alone(smollm2: ResolvedModel, codec: Tokenizer) -> None:
    alone(smollm2, codec, [0, 3])


@pytest.mark.slow
def test_each_alone(smollm2: ResolvedModel, codec: Tokenizer) -> None:
    alone(smollm2, codec, list(range(10)))


@pytest.mark.slow
def test_the_golden_ids_are_transformers_too(smollm2: ResolvedModel) -> None:
    from ferrum_mlx.backends.torch import device
    from ferrum_mlx.backends.torch.loader import load_model

    model, _ = load_model(smollm2, device.select("cpu"))
    stored = golden.stored()
    for prompt, wanted in zip(stored["prompts"], stored["outputs"], strict=True):
        assert torch_reference.generate(model, prompt, golden.NEW_TOKENS) == wanted
