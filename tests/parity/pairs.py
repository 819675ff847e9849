"""Features, and a run of one request with any of them: one side of the pair matrix."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.backends.mlx import zoo
from ferrum_mlx.backends.mlx.adapters import linear_places
from ferrum_mlx.backends.mlx.executor import MLXExecutor
from ferrum_mlx.backends.zoo import VOCAB
from ferrum_mlx.batch import TokenLogprobs
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Event, Failed, Finished, Stepped, Submit
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.guesses import Guesses, spoiled

from ..unit.tiny_adapters import write_peft

NEW_TOKENS = 14
_FOLDER = tempfile.TemporaryDirectory()


@dataclass
class Case:
    """What is run, and what must have happened for it to count."""

    layers: frozenset[str] = frozenset()
    params: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prompt_len: int = 21
    stop: bool = False
    neighbours: int = 0
    warm: bool = False  # a prompt with the same beginning was there before
    preempt_at: int | None = None  # step
    cancel_at: int | None = None
    urgent_at: int | None = None
    drafts: bool = False
    adapter: str = ""
    proofs: list[Callable[[Run], bool]] = field(default_factory=list)

    @property
    def model(self) -> str:
        return MODELS[self.layers]

    @property
    def kv_bits(self) -> int | None:
        bits: int | None = self.settings.get("kv_bits")
        return bits


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    usage: tuple[int, int] = (0, 0)


@dataclass
class Run:
    outputs: list[Output]
    requests: list[Request]
    mixed_steps: int = 0
    chunks: int = 0
    cancelled: bool = False
    drafted: int = 0
    accepted: int = 0


MODELS = {
    frozenset(): "llama",
    frozenset({"window"}): "gemma3_text",
    frozenset({"recurrent"}): "qwen3_next",
    frozenset({"window", "recurrent"}): "recurrent_gemma",
}


# Features: what they add to a case


def batching(case: Case) -> None:
    case.neighbours = max(case.neighbours, 3)
    case.proofs.append(lambda run: run.mixed_steps > 0)


def chunked_prefill(case: Case) -> None:
    case.settings |= {"max_prefill_chunk": 5, "prefill_while_decoding": 3}
    case.proofs.append(lambda run: run.chunks > 2)


def prefix_hit(case: Case) -> None:
    case.warm = True
    case.proofs.append(lambda run: all(r.num_cached_tokens > 0 for r in run.requests))


def preemption(case: Case) -> None:
    case.preempt_at = 6
    case.proofs.append(lambda run: run.requests[0].preemptions > 0)


def several_samples(case: Case) -> None:
    case.params |= {"n": 3, "temperature": 1.0, "seed": 11}
    case.proofs.append(lambda run: len({tuple(o.token_ids) for o in run.outputs}) == 3)


def stop_strings(case: Case) -> None:
    case.stop = True
    case.proofs.append(lambda run: all(o.reason == "stop" for o in run.outputs))


def logprobs(case: Case) -> None:
    case.params |= {"logprobs": 3}
    case.proofs.append(lambda run: all(len(o.logprobs) == len(o.token_ids) for o in run.outputs))


def prompt_logprobs(case: Case) -> None:
    case.params |= {"prompt_logprobs": 2}
    case.proofs.append(lambda run: all(len(o.prompt_logprobs) + 1 == o.usage[0] for o in run.outputs))


def penalties(case: Case) -> None:
    case.params |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    case.params |= {"logit_bias": {7: 3.0}, "banned_token_ids": (5,), "min_tokens": 3}


def seeded_sampling(case: Case) -> None:
    case.params |= {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 0}


def sliding_window(case: Case) -> None:
    case.layers |= {"window"}


def recurrent_layers(case: Case) -> None:
    case.layers |= {"recurrent"}


def cancelled_neighbour(case: Case) -> None:
    case.neighbours = max(case.neighbours, 1)
    case.cancel_at = 5
    case.proofs.append(lambda run: run.cancelled)


def priority(case: Case) -> None:
    case.urgent_at = 4
    case.proofs.append(lambda run: run.requests[-1].preemptions > 0)


def long_context(case: Case) -> None:
    case.prompt_len = 330


def speculation(case: Case) -> None:
    """Two of three drafts are the plain run's tokens, past its stop too; batchmates' are mostly wrong."""
    case.drafts = True
    if case.preempt_at is not None:  # it ends in fewer steps
        case.preempt_at = 3
    case.proofs.append(lambda run: run.drafted > run.accepted > 0)


def lora_adapter(case: Case) -> None:
    """Batchmates go through another one, or none."""
    case.adapter = "a"


def kv_in_8_bits(case: Case) -> None:
    case.settings |= {"kv_bits": 8}


def kv_in_4_bits(case: Case) -> None:
    case.settings |= {"kv_bits": 4}


FEATURES: dict[str, Callable[[Case], None]] = {
    "batching": batching,
    "chunked prefill": chunked_prefill,
    "prefix hit": prefix_hit,
    "preemption": preemption,
    "n > 1": several_samples,
    "stop strings": stop_strings,
    "logprobs": logprobs,
    "prompt logprobs": prompt_logprobs,
    "penalties": penalties,
    "seeded sampling": seeded_sampling,
    "sliding window": sliding_window,
    "recurrent layers": recurrent_layers,
    "cancel of a neighbour": cancelled_neighbour,
    "priority": priority,
    "long context": long_context,
    "speculation": speculation,
    "LoRA adapter": lora_adapter,
    "8-bit KV": kv_in_8_bits,
    "4-bit KV": kv_in_4_bits,
}

# Of the adapter's pairs, those that could go wrong by it; the others are slow ones.
_WITH_ADAPTER = {"batching", "chunked prefill", "prefix hit", "preemption", "recurrent layers", "speculation"}


def all_pairs(names: Iterable[str]) -> list[Any]:
    """As parameters of a test."""
    return [
        pytest.param(*pair, marks=pytest.mark.slow)
        if "LoRA adapter" in pair and not _WITH_ADAPTER & set(pair)
        else pair
        for pair in combinations(names, 2)
        if pair != ("8-bit KV", "4-bit KV")  # one of them
    ]


# Runs


def prompt(length: int, salt: int = 0) -> list[int]:
    return np.random.default_rng([length, salt]).integers(0, VOCAB, length).tolist()


def build(model: str, settings: dict[str, Any]) -> Engine:
    defaults = {"numerics": "exact", "block_size": 4, "max_model_len": 400, "max_num_batched_tokens": 512}
    config = EngineConfig(**(defaults | settings))
    executor = MLXExecutor(zoo.build(model), zoo.info(model), config, host=True, free_memory=2**30)
    executor.prepare_startup()
    return Engine(executor, FakeCodec(), config, backend="mlx", backend_reason="a test")


@cache
def adapters_of(model: str) -> dict[str, str]:
    """Two adapters of every third Linear layer, by name, as folders that last as long as the process."""
    folder = Path(_FOLDER.name) / model
    places = linear_places(dict(zoo.build(model).named_modules()))
    linear = [
        (path, place)
        for path, place in places.items()
        if isinstance(place, tuple) and ".layers." in path and "experts" not in path
    ]
    for seed, name in enumerate("ab"):
        write_peft(folder / name, dict(linear[seed::3]), seed, target_modules="some of them")
    return {name: str(folder / name) for name in "ab"}


def submits_of(case: Case, params: dict[str, Any]) -> list[Submit]:
    params = {"max_tokens": NEW_TOKENS, "ignore_eos": True} | params
    low = 1 if case.urgent_at is not None else 0
    samples = range(params.get("n", 1))
    return [
        Submit(
            f"s{i}",
            prompt(case.prompt_len),
            SamplingParams(**params),
            priority=low,
            sample_index=i,
            adapter=case.adapter,
        )
        for i in samples
    ]


def take(outputs: dict[str, Output], events: list[Event]) -> None:
    for event in events:
        if isinstance(event, Failed):
            raise event.error
        if not isinstance(event, (Delta, Finished)) or event.request_id not in outputs:
            continue
        output = outputs[event.request_id]
        if isinstance(event, Delta):
            output.token_ids += event.token_ids
            output.text += event.text
            output.logprobs += event.logprobs
        else:
            output.reason, output.prompt_logprobs = event.finish_reason, event.prompt_logprobs
            output.usage = (event.usage.prompt_tokens, event.usage.completion_tokens)


def guesses(submits: Sequence[Submit], plain: Sequence[Output]) -> Guesses:
    answers = {submit.request_id: out.token_ids for submit, out in zip(submits, plain, strict=True)}
    guess = spoiled(answers, VOCAB)
    return Guesses(lambda request, room: guess(request, room) or request.tokens(0, min(room, 5)))


def run(case: Case, params: dict[str, Any], plain: Sequence[Output] = ()) -> Run:
    """`plain` is what drafts are made of, where the case has any."""
    submits = submits_of(case, params)
    settings = dict(case.settings)
    if case.urgent_at is not None:
        settings["max_num_seqs"] = case.neighbours + len(submits)
    if case.adapter:
        settings["adapters"] = adapters_of(case.model)
    engine = build(case.model, settings)
    drafts = engine.speculation = guesses(submits, plain) if case.drafts else None
    if case.warm:
        beginning = prompt(case.prompt_len)[: case.prompt_len // 2]
        engine.submit(Submit("before", beginning, SamplingParams(max_tokens=2), adapter=case.adapter))
        while engine.has_work():
            engine.step()
    for i in range(case.neighbours):
        beside = SamplingParams(max_tokens=40, ignore_eos=True, temperature=float(i), seed=i)
        adapter = ("b", "", "a")[i % 3] if case.adapter else ""
        engine.submit(Submit(f"n{i}", prompt(9 + i, salt=i + 1), beside, adapter=adapter))
    engine.step()
    for submit in submits:
        engine.submit(submit)
    requests = [engine._streams[submit.request_id].request for submit in submits]
    result = Run([Output() for _ in submits], requests)
    outputs = {submit.request_id: output for submit, output in zip(submits, result.outputs, strict=True)}
    step = 0
    while engine.has_work():
        _act(case, engine, result, step)
        before = sum(r.num_computed_tokens for r in requests)
        events = engine.step()
        for stats in (event.stats for event in events if isinstance(event, Stepped)):
            moved = sum(r.num_computed_tokens for r in requests) != before
            result.mixed_steps += bool(stats.prefill_tokens and stats.decode_tokens)
            result.chunks += bool(stats.prefill_tokens) and moved
        take(outputs, events)
        step += 1
    assert engine.executor.kv_capacity_snapshot().used_blocks == 0
    if drafts is not None:
        result.drafted, result.accepted = drafts.stats().drafted, drafts.stats().accepted
    engine.shutdown()
    return result


def _act(case: Case, engine: Engine, result: Run, step: int) -> None:
    first = result.requests[0]
    if case.preempt_at is not None and step >= case.preempt_at and not first.preemptions:
        entry = engine._scheduler._entries.get(first)
        if entry is not None and first.cache_id is not None:
            engine._scheduler._preempt([entry])
    if step == case.cancel_at:
        result.cancelled = "n0" in engine._streams
        engine.abort("n0")
    if step == case.urgent_at:
        engine.submit(Submit("urgent", prompt(7, salt=9), SamplingParams(max_tokens=4, ignore_eos=True)))


def case_of(*features: str) -> Case:
    case = Case()
    for feature in features:
        FEATURES[feature](case)
    return case
