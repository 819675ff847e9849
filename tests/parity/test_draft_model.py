"""A draft model that is the target, and one of its first layers alone, on real attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Delta, Failed, Finished, Submit
from ferrum_mlx.metrics import RequestStats
from ferrum_mlx.model_info import ModelInfo
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.speculative.draft_model import DraftModelProposer
from ferrum_mlx.speculative.speculation import Speculation

LAYERS, VOCAB = 4, 258
CONFIG = EngineConfig(numerics="exact", block_size=4, max_model_len=320, max_num_seqs=4, kv_memory=2**24)
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, ignore_eos=True, seed=3)
SHAPES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
INFO = ModelInfo(
    model_id="tiny",
    model_type="llama",
    num_parameters=0,
    hidden_size=32,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_sequence_length=512,
    dtype="float32",
    device="cpu",
)
Pair = Callable[[int], tuple[PagedExecutor, PagedExecutor]]


def _mlx(count: int) -> tuple[PagedExecutor, PagedExecutor]:
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    from ferrum_mlx.backends.mlx.executor import MLXExecutor
    from ferrum_mlx.backends.mlx.first_layers import first_layers

    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    mx.random.seed(1)
    model = Model(ModelArgs(model_type="llama", rms_norm_eps=1e-5, tie_word_embeddings=True, **SHAPES))
    model.apply(lambda array: array * 3)  # larger logits than a fresh model's
    models = model, first_layers(model, count, "llama")
    target, draft = (MLXExecutor(m, INFO, CONFIG, host=True, free_memory=2**30) for m in models)
    return target, draft


def _torch(count: int) -> tuple[PagedExecutor, PagedExecutor]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ferrum_mlx.backends.torch.executor import TorchExecutor
    from ferrum_mlx.backends.torch.first_layers import first_layers

    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.2, tie_word_embeddings=True, **SHAPES)).eval()
    models = model, first_layers(model, count, "llama")
    target, draft = (TorchExecutor(m, INFO, CONFIG, free_memory=2**30) for m in models)
    return target, draft


@pytest.fixture(params=["mlx", "torch"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Makes a target, and an executor over so many of its first layers."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return {"mlx": _mlx, "torch": _torch}[request.param]


def run(
    target: PagedExecutor, draft: PagedExecutor | None, tokens: int = 260, preempt_at: int = 0
) -> tuple[list[int], list[RequestStats]]:
    """Two requests together, one of them preempted at that step; all ids, and what became of the drafts."""
    speculation = None
    for executor in (target, draft):
        if executor is not None:
            executor.prepare_startup()
    if draft is not None:
        speculation = Speculation(DraftModelProposer(draft), name="draft", max_drafts=4)
        speculation._length.choose = (  # type: ignore[method-assign] - whatever the clock says
            lambda limits, *_, **__: {request: limit for request, (limit, _) in limits.items() if limit > 0}
        )
    engine = Engine(target, FakeCodec(), CONFIG, backend="test", backend_reason="", speculation=speculation)
    for name in ("a", "b"):
        engine.submit(
            Submit(name, [5, 6, 7, ord(name), 9], replace(PARAMS, seed=ord(name), max_tokens=tokens))
        )
    ids: dict[str, list[int]] = {"a": [], "b": []}
    stats, step = [], 0
    while engine.has_work():
        step += 1
        if step == preempt_at:
            engine._scheduler._preempt([engine._scheduler._entries[engine._streams["a"].request]])
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                ids[event.request_id] += event.token_ids
            elif isinstance(event, Finished):
                stats.append(event.stats)
    for executor in (target, draft):
        assert executor is None or executor.kv_capacity_snapshot().used_blocks == 0
    engine.shutdown()
    return ids["a"] + ids["b"], stats


def test_a_draft_model_that_is_the_target_is_right_always(pair: Pair) -> None:
    """Also at temperature 0.8: draft and verify of a position see the same noise."""
    target, draft = pair(LAYERS)
    output, stats = run(target, draft, preempt_at=20)
    plain, _ = run(pair(LAYERS)[0], None)
    assert output == plain
    assert len(output) == 520
    assert sum(each.drafted_tokens for each in stats) > 380
    assert [each.preemptions for each in stats if each.request_id == "a"] == [1]
    assert all(each.accepted_tokens == each.drafted_tokens for each in stats)


def test_the_first_layer_alone_may_be_wrong_and_changes_nothing(pair: Pair) -> None:
    target, draft = pair(1)
    output, stats = run(target, draft, 30)
    plain, _ = run(pair(LAYERS)[0], None, 30)
    assert output == plain
    assert all(each.accepted_tokens < each.drafted_tokens for each in stats)
