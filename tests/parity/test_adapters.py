"""LoRA adapters, several in one batch, against models with the adapters merged into their weights.

The merged models are run by mlx-lm's and transformers' own generate, one prompt at a time: nothing of ours
is in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx import nearties
from ferrum_mlx.backends.base import PagedExecutor
from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.backends.zoo import VOCAB, info
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import UnsupportedModelError
from ferrum_mlx.messages import Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.runs import Output, Subject, run

from ..contract.driver import FULL, admit, item
from ..contract.driver import run as step
from ..unit.tiny_adapters import Deltas, write_mlx_lm, write_peft

BACKENDS = ["mlx-exact", "mlx-fast", *(["torch-exact", "torch-fast"] if find_spec("torch") else [])]
TOKENS = 10
PROMPTS = [
    np.random.default_rng([n, i]).integers(1, VOCAB, n).tolist() for i, n in enumerate((19, 5, 33, 12))
]


def every_size(backend: str, model: str) -> dict[str, tuple[int, int]]:
    """(in, out) of every Linear layer inside the layers, by path."""
    zoo = import_module(f"ferrum_mlx.backends.{backend.split('-')[0]}.zoo")
    places = import_module(f"ferrum_mlx.backends.{backend.split('-')[0]}.adapters").linear_places
    found = places(dict(zoo.build(model).named_modules()))
    return {path: size for path, size in found.items() if ".layers." in path and isinstance(size, tuple)}


@dataclass
class Adapters:
    config: tuple[tuple[str, str], ...]
    deltas: dict[str, Deltas]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """a in PEFT's form on some layers, b in mlx-lm's on all."""
    folder = tmp_path_factory.mktemp("adapters")
    every = every_size("mlx", "llama")  # the same paths as in transformers
    some = {p: s for p, s in every.items() if p.endswith(("q_proj", "v_proj", "down_proj"))}
    deltas = {"": {}, "a": write_peft(folder / "a", some, 1), "b": write_mlx_lm(folder / "b", every, 2)}
    return Adapters((("a", str(folder / "a")), ("b", str(folder / "b"))), deltas)


def executor(backend: str, config: EngineConfig, model: str = "llama") -> PagedExecutor:
    made: PagedExecutor
    if backend.startswith("mlx"):
        from ferrum_mlx.backends.mlx import zoo as mlx_zoo
        from ferrum_mlx.backends.mlx.executor import MLXExecutor

        built = mlx_zoo.build(model)
        made = MLXExecutor(built, info(model), config, host=True, free_memory=2**28)
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


@pytest.mark.parametrize("bits", [0, 4])
def test_mlx_lm_s_own_layers_give_the_same(bits: int, tmp_path: Path) -> None:
    """mlx-lm loads the same folder into its LoRALinear, over plain and over quantized layers."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import generate_step
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tuner.utils import load_adapters

    from ferrum_mlx.backends.mlx.adapters import linear_places
    from ferrum_mlx.backends.mlx.executor import MLXExecutor

    def model() -> Any:
        mx.random.seed(3)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        settings = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        made = Model(ModelArgs.from_dict(settings | sizes | heads))
        made.apply(lambda array: array * 3)
        if bits:
            nn.quantize(made, group_size=32, bits=bits)
        return made

    def ids(of: Any, prompt: list[int]) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), of, max_tokens=TOKENS)]

    places = linear_places(dict(model().named_modules()))
    last = {path: size for path, size in places.items() if ".layers.1." in path and isinstance(size, tuple)}
    write_mlx_lm(tmp_path, last, 5, num_layers=1)
    config = EngineConfig(adapters=(("a", str(tmp_path)),), block_size=4, max_model_len=64)
    ours = MLXExecutor(model(), info("llama"), config, host=not bits, free_memory=2**28)
    ours.prepare_startup()
    engine = Engine(ours, FakeCodec(), config, backend="mlx", backend_reason="")
    done = run(Subject(engine, FakeCodec(), config), batch(["a", "", "a", ""]), max_chunk=7)
    adapted, plain = load_adapters(model(), str(tmp_path)), model()
    for i, prompt in enumerate(PROMPTS):
        theirs, other = (plain, adapted) if i % 2 else (adapted, plain)
        assert done.outputs[str(i)].ids == ids(theirs, prompt)
        assert done.outputs[str(i)].ids != ids(other, prompt)


@pytest.mark.skipif("torch-fast" not in BACKENDS, reason="torch is not installed")
def test_packed_layers_and_replayed_steps(adapters: Adapters) -> None:
    """Against the packed model with the change written into each layer's own forward."""
    import torch

    from ferrum_mlx.backends.torch import weights, zoo
    from ferrum_mlx.backends.torch.executor import TorchExecutor

    def packed() -> Any:
        model = zoo.build("llama")
        assert "int8" in weights.pack(model, kind="int8")[0]
        return model

    def change(layer: Any, delta: np.ndarray) -> None:
        own, added = layer.forward, torch.from_numpy(delta)
        layer.forward = lambda x: own(x) + x @ added.T

    config = EngineConfig(adapters=adapters.config, block_size=4, max_model_len=128)
    facts = replace(info("llama"), computes_in="bfloat16")
    ours = TorchExecutor(packed(), facts, config, free_memory=2**28, half=False)
    ours.prepare_startup()
    assert all("numba is not installed" in reason for reason in ours.capabilities().off)
    ids, want = PROMPTS[1], []
    for name in ("a", "b", ""):
        theirs = packed()
        for path, delta in adapters.deltas[name].items():
            change(theirs.get_submodule(path), delta)
        with torch.inference_mode():
            want.append(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
    caches = [admit(ours, ids, adapter=name) for name in ("a", "b", "")]
    step(ours, *(item(cache, ids[:-1], 0, is_final_chunk=False) for cache in caches))
    replayed = step(ours, *(item(cache, ids[-1:], len(ids) - 1, logits=FULL) for cache in caches))
    for row, result in zip(want, replayed, strict=True):
        assert result.logits is not None
        np.testing.assert_allclose(result.logits[0], row, atol=nearties.SAME_PRODUCTS * np.abs(row).max())
    assert np.abs(want[0] - want[1]).max() > 1
    assert np.abs(want[0] - want[2]).max() > 1


@pytest.mark.parametrize(
    ("backend", "model", "path"),
    [
        ("mlx-fast", "mamba", "backbone.layers.0.mixer.x_proj"),  # called token by token
        ("mlx-fast", "afm7", "model.layers.0.self_attn.qkv_proj"),  # three outputs
        ("torch-fast", "phimoe", "model.layers.0.mlp.router"),  # scores and choices
    ],
)
def test_a_layer_that_is_not_one_output_a_token_is_refused(
    backend: str, model: str, path: str, tmp_path: Path
) -> None:
    if backend not in BACKENDS:
        pytest.skip("torch is not installed")
    write_peft(tmp_path, {path: every_size(backend, model)[path]}, 1, target_modules="one of them")
    with pytest.raises(UnsupportedModelError, match=f"{path} is not a layer of one output a token"):
        subject(backend, (("a", str(tmp_path)),), model)
