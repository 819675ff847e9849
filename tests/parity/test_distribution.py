"""What speculation outputs is distributed as the target's own samples are: 20,000 seeds, a tiny vocabulary.

The exact distribution of three tokens is worked out from the model's dense logits, in numpy. The bound on
the total variation between it and what was counted is the one that samples of it stay within 999 times in
a thousand, found by drawing such samples. A rule that accepts every draft above a probability fails it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.batch import ItemResult, UnifiedBatch
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Event, Failed, Submit
from ferrum_mlx.model_info import ModelInfo
from ferrum_mlx.request import Request
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.guesses import Guesses

SEEDS, VOCAB, LENGTH = 20_000, 8, 3
PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    max_tokens=LENGTH,
    ignore_eos=True,
)
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB}
SIZES |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
CONFIG = EngineConfig(
    numerics="exact",
    block_size=16,
    max_model_len=16,
    max_num_seqs=256,
    max_num_batched_tokens=4096,
    prefix_cache=False,
    kv_memory=2**20,
)
INFO = ModelInfo(
    model_id="tiny",
    model_type="llama",
    num_parameters=0,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=VOCAB,
    max_sequence_length=64,
    dtype="float32",
    device="cpu",
)


def _mlx(seed: int) -> PagedExecutor:
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    from ferrum_mlx.backends.mlx.executor import MLXExecutor

    mx.random.seed(seed)
    model = Model(ModelArgs(model_type="llama", max_position_embeddings=64, **SIZES))
    model.apply(lambda array: array * 1.5)
    return MLXExecutor(model, INFO, CONFIG, host=False, free_memory=2**30)


def _torch(seed: int) -> PagedExecutor:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ferrum_mlx.backends.torch.executor import TorchExecutor

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, initializer_range=0.35, **SIZES)).eval()
    return TorchExecutor(model, INFO, replace(CONFIG, numerics="fast"), free_memory=2**30)


BACKENDS: dict[str, Callable[[int], PagedExecutor]] = {"mlx": _mlx}
if find_spec("torch"):  # else the torch tests' own files are skipped, and say why
    BACKENDS["torch"] = _torch


class Exact:
    """The target's distribution of the next token, out of its dense logits, in float64."""

    def __init__(self, executor: PagedExecutor) -> None:
        self.row = cache(lambda output: self._row(executor, output))

    @staticmethod
    def _row(executor: PagedExecutor, output: tuple[int, ...]) -> np.ndarray:
        logits = executor.forward([*PROMPT, *output])[-1].astype(np.float64)
        for token in {*PROMPT, *output}:
            logits[token] *= 1 / 1.2 if logits[token] > 0 else 1.2
        for token, count in Counter(output).items():
            logits[token] -= 0.3 + 0.2 * count
        scores = np.exp((logits - logits.max()) / 0.8)
        scores /= scores.sum()
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(scores[order]) - scores[order]  # the token that reaches top_p stays
        scores[order[before >= 0.9]] = 0
        return scores / scores.sum()

    def of_sequences(self) -> np.ndarray:
        """[VOCAB ** LENGTH], in the order of `product`."""
        return np.array(
            [
                np.prod([self.row(ids[:i])[token] for i, token in enumerate(ids)])
                for ids in product(range(VOCAB), repeat=LENGTH)
            ]
        )


def bound(exact: np.ndarray) -> float:
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(SEEDS, exact, size=4000) / SEEDS
    return float(np.quantile(np.abs(drawn - exact).sum(axis=1) / 2, 0.999))


def drained(engine: Engine) -> Iterator[Event]:
    while engine.has_work():
        yield from engine.step()


def counted(executor: PagedExecutor, draft: PagedExecutor) -> tuple[np.ndarray, Guesses]:
    """Frequencies [VOCAB ** LENGTH] of the outputs, with drafts by another model's greedy tokens."""

    @cache
    def greedy(tokens: tuple[int, ...]) -> int:
        return int(draft.forward(tokens)[-1].argmax())

    def guess(request: Request, room: int) -> Sequence[int]:
        tokens, drafts = (*request.prompt, *request.output), []
        for _ in range(room):
            drafts.append(greedy((*tokens, *drafts)))
        return drafts

    drafts = Guesses(guess)
    engine = Engine(executor, FakeCodec(), CONFIG, backend="test", backend_reason="test", speculation=drafts)
    submits = (Submit(str(seed), PROMPT, replace(PARAMS, seed=seed)) for seed in range(SEEDS))
    outputs: dict[str, list[int]] = {}
    while batch := list(islice(submits, CONFIG.max_num_seqs)):
        for submit in batch:
            engine.submit(submit)
        for event in drained(engine):
            assert not isinstance(event, Failed)
            if isinstance(event, Delta):
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
    assert len(outputs) == SEEDS
    counts = Counter(map(tuple, outputs.values()))
    return np.array([counts[ids] for ids in product(range(VOCAB), repeat=LENGTH)]) / SEEDS, drafts


def accept_above(executor: PagedExecutor, exact: Exact, probability: float) -> None:
    """The biased rule: a draft above the probability counts as what the row has sampled."""
    launch = executor._launch

    class Biased:
        def __init__(self, batch: UnifiedBatch) -> None:
            self.batch, self.pending = batch, launch(batch)

        def result(self) -> list[ItemResult]:
            return list(map(self.biased, self.batch.items, self.pending.result()))  # type: ignore[union-attr]

        def biased(self, item: Any, result: ItemResult) -> ItemResult:
            tokens, output = list(result.token_ids), (*item.sampling.output,)
            for i, draft in enumerate(item.q_tokens[1:] if item.verify else ()):
                if exact.row((*output, *item.q_tokens[1 : i + 1]))[draft] > probability:
                    tokens[i] = draft
            return replace(result, token_ids=tuple(tokens))

    executor._launch = Biased  # type: ignore[method-assign,assignment]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_are_distributed_as_the_target_s(backend: str) -> None:
    executor, draft = BACKENDS[backend](1), BACKENDS[backend](3)
    exact = Exact(executor)
    wanted = exact.of_sequences()
    assert wanted.sum() == pytest.approx(1)
    assert (wanted > 0.01).sum() > 10
    found, drafts = counted(executor, draft)
    apart, limit = float(np.abs(found - wanted).sum() / 2), bound(wanted)
    print(f"{backend}: total variation {apart:.4f}, bound {limit:.4f}, {drafts.stats()}")
    assert 0.05 < drafts.stats().acceptance_rate < 0.7  # it guesses, and disagrees
    assert apart < limit
    accept_above(executor, exact, 0.1)
    biased, _ = counted(executor, draft)
    apart = float(np.abs(biased - wanted).sum() / 2)
    print(f"{backend}: with the biased rule {apart:.4f}")
    assert apart > limit
