"""LoRA adapters, several in one batch, against models with the adapters merged into their weights.

The merged models are run by mlx-lm's and transformers' own generate, one prompt at a time: nothing of ours
is in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.backends.zoo import VOCAB, info
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.runs import Output, Subject, run

from ..unit.tiny_adapters import Deltas, write_mlx_lm, write_peft

BACKENDS = ["mlx-exact", "mlx-fast", *(["torch-exact", "torch-fast"] if find_spec("torch") else [])]
TOKENS = 10
PROMPTS = [
    np.random.default_rng([n, i]).integers(1, VOCAB, n).tolist() for i, n in enumerate((19, 5, 33, 12))
]


def sizes(model: str) -> dict[str, tuple[int, int]]:
    """(in, out) of every Linear layer inside the layers, by path: the same in both libraries."""
    from ferrum_mlx.backends.mlx import zoo
    from ferrum_mlx.backends.mlx.adapters import linear_places

    places = linear_places(dict(zoo.build(model).named_modules()))
    return {path: place for path, place in places.items() if ".layers." in path and isinstance(place, tuple)}


@dataclass
class Adapters:
    config: tuple[tuple[str, str], ...]
    deltas: dict[str, Deltas]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """a in PEFT's form on some layers, b in mlx-lm's on all."""
    folder = tmp_path_factory.mktemp("adapters")
    every = sizes("llama")
    some = {p: s for p, s in every.items() if p.endswith(("q_proj", "v_proj", "down_proj"))}
    deltas = {"": {}, "a": write_peft(folder / "a", some, 1), "b": write_mlx_lm(folder / "b", every, 2)}
    return Adapters((("a", str(folder / "a")), ("b", str(folder / "b"))), deltas)


def executor(backend: str, config: EngineConfig, model: str = "llama") -> PagedExecutor:
    made: PagedExecutor
    if backend.startswith("mlx"):
        from ferrum_mlx.backends.mlx import zoo as mlx_zoo
        from ferrum_mlx.backends.mlx.executor import MLXExecutor

        built = mlx_zoo.build(model)
        made = MLXExecutor(built, info(model), config, host=backend != "mlx-device", free_memory=2**28)
    else:
        from ferrum_mlx.backends.torch import zoo
        from ferrum_mlx.backends.torch.executor import TorchExecutor

        made = TorchExecutor(zoo.build(model), info(model), config, free_memory=2**28)
    made.prepare_startup()
    return made


def subject(backend: str, named: tuple[tuple[str, str], ...], model: str = "llama", **more: Any) -> Subject:
    settings: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    numerics = "exact" if backend.endswith("exact") else "fast"
    config = EngineConfig(numerics=numerics, adapters=named, **(settings | more))
    made = executor(backend, config, model)
    return Subject(Engine(made, FakeCodec(), config, backend=backend, backend_reason=""), FakeCodec(), config)


def merged(backend: str, deltas: Deltas, prompt: list[int], model: str = "llama") -> Output:
    """The library's own generate over W + scale · B A."""
    if backend.startswith("mlx"):
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        from ferrum_mlx.backends.mlx import zoo as mlx_zoo

        ours = mlx_zoo.build(model)
        modules = dict(ours.named_modules())
        for path, delta in deltas.items():
            modules[path].weight = modules[path].weight + mx.array(delta)
        rows: list[Any] = []

        def keep(_: Any, logits: Any) -> Any:
            rows.append(np.array(logits[0]))
            return logits

        steps = generate_step(mx.array(prompt), ours, max_tokens=TOKENS, logits_processors=[keep])
        return Output([int(token) for token, _ in steps], rows[:TOKENS])
    import torch

    from ferrum_mlx.backends.torch import zoo

    theirs: Any = zoo.build(model)
    for path, delta in deltas.items():
        theirs.get_submodule(path).weight.data += torch.from_numpy(delta)
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    made = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Output(made.sequences[0, len(prompt) :].tolist(), list(torch.cat(made.logits).numpy()))


def request(name: str, prompt: list[int], adapter: str, **params: Any) -> Submit:
    wanted = {"max_tokens": TOKENS, "ignore_eos": True} | params
    return Submit(name, prompt, SamplingParams(**wanted), adapter=adapter)


def batch(choice: list[str]) -> dict[int, list[Submit]]:
    """Two at once and two that come while those decode."""
    made = [
        request(str(i), prompt, adapter)
        for i, (prompt, adapter) in enumerate(zip(PROMPTS, choice, strict=True))
    ]
    return {0: made[:2], 3: made[2:]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_goes_through_its_own_adapter(backend: str, adapters: Adapters) -> None:
    choice = ["a", "", "b", "a"]
    done = run(subject(backend, adapters.config), batch(choice), max_chunk=7)
    assert done.seen.mixed
    assert done.seen.together == 4
    assert done.seen.chunks["2"] > 2
    wrong = 0
    for i, (prompt, adapter) in enumerate(zip(PROMPTS, choice, strict=True)):
        got, want = done.outputs[str(i)], merged(backend, adapters.deltas[adapter], prompt)
        assert got.ids == want.ids
        np.testing.assert_allclose(got.rows, want.rows, atol=1e-4)
        others = [merged(backend, adapters.deltas[other], prompt).ids for other in {"a", "b", ""} - {adapter}]
        wrong += sum(ids != got.ids for ids in others)
    assert wrong == 8  # a wrong adapter, or none, would have shown in every request
