"""LoRA adapters on every backend: whose rows they change, whose prefixes are found, what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeExecutor
from ferrum_mlx.capacity import Admitted, Deferred
from ferrum_mlx.errors import ContractError, UnsupportedModelError
from ferrum_mlx.metrics import LoraMetrics

from ..unit.tiny_adapters import write_mlx_lm, write_peft
from .conftest import Build
from .driver import FULL, admit, item, run

PROMPT = [5, 80, 113, 7, 7, 250, 31, 64, 9, 2, 77, 18, 140]
SIZES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.1.self_attn.q_proj": (32, 32),
    "model.layers.0.mlp.down_proj": (64, 32),
    "model.layers.1.mlp.down_proj": (64, 32),
}


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    write_peft(folder / "a", SIZES, 1)
    keys = sorted({".".join(path.split(".")[3:]) for path in SIZES})
    parameters = {"rank": 4, "scale": 0.5, "keys": keys}
    write_mlx_lm(folder / "b", SIZES, 2, lora_parameters=parameters)
    return {"adapters": {"a": str(folder / "a"), "b": str(folder / "b")}}


def last(executor: PagedExecutor, cache: int, tokens: list[int], start: int = 0) -> np.ndarray:
    (result,) = run(executor, item(cache, tokens, start, logits=FULL))
    assert result.logits is not None
    return result.logits[-1]


def test_rows_of_a_mixed_step_go_through_their_own(build: Build, named: dict[str, Any]) -> None:
    """Of four sequences one is at its first chunk; the model's own forward has the adapter on all rows."""
    executor = build(**named)
    chosen = ["a", "", "b", "a"]
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
    caches = [admit(executor, prompt, adapter=name) for prompt, name in zip(prompts, chosen, strict=True)]
    pairs = list(zip(caches[:3], prompts[:3], strict=True))
    run(executor, *(item(cache, prompt[:-1], 0, is_final_chunk=False) for cache, prompt in pairs))
    items = [item(cache, prompt[-1:], 12, logits=FULL) for cache, prompt in pairs]
    results = run(executor, items[0], item(caches[3], prompts[3], 0, logits=FULL), *items[1:])
    order = [0, 3, 1, 2]
    for i, result in zip(order, results, strict=True):
        want = executor.forward(prompts[i], adapter=chosen[i])[-1]
        assert result.logits is not None
        np.testing.assert_allclose(result.logits[-1], want, atol=2e-5 * max(1, np.abs(want).max()))
        if not isinstance(executor, FakeExecutor):  # whose text is a script's
            for other in {"a", "b", ""} - {chosen[i]}:
                assert np.abs(executor.forward(prompts[i], adapter=other)[-1] - want).max() > 1e-2


def test_rows_without_one_keep_their_bits(build: Build, named: dict[str, Any]) -> None:
    """The same steps, on an executor that has no adapter and on one whose other rows go through two."""
    seen = []
    for settings, others in ((dict[str, Any](), ["", ""]), (named, ["a", "b"])):
        executor = build(**settings)
        if "captured decode steps" in str(executor.capabilities().off):
            pytest.skip("a captured step is padded to another size, which rounds otherwise")
        caches = [admit(executor, PROMPT, adapter=name) for name in (others[0], "", others[1])]
        (_, chunk, _) = run(executor, *(item(cache, PROMPT, 0, logits=FULL) for cache in caches))
        (_, row, _) = run(executor, *(item(cache, [7], 13, logits=FULL) for cache in caches))
        verified = run(executor, *(item(cache, [7, 9, 3], 14, verify=True, logits=FULL) for cache in caches))
        seen.append([result.logits for result in (chunk, row, verified[1])])
    for without, beside in zip(*seen, strict=True):
        np.testing.assert_array_equal(without, beside)


def test_a_prefix_is_found_within_an_adapter_alone(build: Build, named: dict[str, Any]) -> None:
    executor = build(**named)
    for name in ("a", "b", ""):
        cold = admit(executor, PROMPT, use_prefix=True, adapter=name)
        assert executor.kv.num_cached(cold) == 0, "a hit across adapters"
        want = last(executor, cold, PROMPT)
        warm = admit(executor, PROMPT, use_prefix=True, adapter=name)
        assert executor.kv.num_cached(warm) == 12
        got = last(executor, warm, PROMPT[12:], 12)
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1, np.abs(want).max()))
        executor.release_cache(cold)
        executor.release_cache(warm)
    metrics = executor.cache_metrics()
    assert (metrics.hits, metrics.misses) == (3, 3)


def test_what_is_decoded_is_found_by_its_adapter_too(build: Build, named: dict[str, Any]) -> None:
    executor = build(**named)
    first = admit(executor, PROMPT, use_prefix=True, adapter="a")
    run(executor, item(first, PROMPT, 0))
    for position in range(13, 17):
        run(executor, item(first, [position], position))
    executor.release_cache(first)
    longer = [*PROMPT, 13, 14, 15, 16, 17]
    for name, cached in (("b", 0), ("", 0), ("a", 16)):
        cache = admit(executor, longer, use_prefix=True, adapter=name)
        assert executor.kv.num_cached(cache) == cached
        executor.release_cache(cache)


def test_nobody_waits_for_another_adapter_s_prefix(build: Build, named: dict[str, Any]) -> None:
    executor = build(**named)
    admit(executor, PROMPT, use_prefix=True, adapter="a")
    assert isinstance(executor.try_admit_prefill("same", PROMPT, adapter="a"), Deferred)
    for name in ("b", ""):
        assert isinstance(executor.try_admit_prefill(f"other {name}", PROMPT, adapter=name), Admitted)


def test_what_is_counted(build: Build, named: dict[str, Any]) -> None:
    assert build().lora_metrics() == LoraMetrics()
    executor = build(**named)
    caches = [admit(executor, PROMPT, adapter=name) for name in ("a", "", "a")]
    assert executor.lora_metrics() == LoraMetrics(True, 2, {"a": 2, "b": 0})
    executor.release_cache(caches[0])
    executor.release_cache(caches[1])
    assert executor.lora_metrics().active == {"a": 1, "b": 0}
    with pytest.raises(ContractError, match="no adapter 'c'; allowed: a, b"):
        executor.try_admit_prefill("unknown", PROMPT, adapter="c")
    with pytest.raises(ContractError, match="no adapter 'c'"):
        executor.forward(PROMPT, adapter="c")


def test_adapters_are_part_of_the_memory(build: Build, named: dict[str, Any]) -> None:
    plain, executor = build(), build(**named)
    if isinstance(executor, FakeExecutor):
        assert executor.memory() == plain.memory()
        return
    values = 2 * sum(4 * (size[0] + size[1]) for size in SIZES.values())
    assert executor.memory().parameter_bytes - plain.memory().parameter_bytes == 4 * values


def test_a_model_is_as_before_when_its_executor_has_ended(build: Build, named: dict[str, Any]) -> None:
    executor = build(**named)
    if isinstance(executor, FakeExecutor):
        return
    model: Any = executor._model if hasattr(executor, "_model") else executor._packed._model
    layer = model.model.layers[0].self_attn.q_proj
    kind = type(layer)
    executor.shutdown()
    if hasattr(layer, "_forward_hooks"):
        assert not layer._forward_hooks
    else:
        assert type(layer) is kind.__bases__[0]


def test_an_adapter_that_does_not_fit_is_refused(build: Build, tmp_path: Path) -> None:
    write_peft(tmp_path, {"model.layers.7.self_attn.q_proj": (32, 32)}, 1)
    if isinstance(build(), FakeExecutor):  # it reads none
        return
    with pytest.raises(UnsupportedModelError, match=r"the adapter 'far' .* changes model\.layers\.7\."):
        build(adapters={"far": str(tmp_path)})
