"""A model's first layers as a model of their own: the weights are shared, nothing else is."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs

from ferrum_mlx.backends.mlx.first_layers import first_layers
from ferrum_mlx.errors import UnsupportedModelError

IDS = mx.array([[3, 1, 4, 1, 5]])


@pytest.fixture
def model() -> Model:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    args = ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=50,
    )
    return Model(args)


def test_embedding_first_layers_norm_and_head(model: Model) -> None:
    twin = first_layers(model, 2, "llama")
    hidden = model.model.embed_tokens(IDS)
    for layer in model.layers[:2]:
        hidden = layer(hidden, mask="causal")
    logits = model.model.embed_tokens.as_linear(model.model.norm(hidden))
    assert np.allclose(np.array(twin(IDS)), np.array(logits), atol=1e-6)


def test_weights_are_the_same_arrays_and_modules_are_not(model: Model) -> None:
    twin = first_layers(model, 3, "llama")
    assert (len(twin.layers), len(model.layers)) == (3, 4)
    for own, other in zip(twin.layers, model.layers[:3], strict=True):
        assert own is not other
        assert own.self_attn.q_proj.weight is other.self_attn.q_proj.weight
    before = np.array(model(IDS))
    twin.layers[0].mlp = nn.Identity()
    assert np.array_equal(np.array(model(IDS)), before)


def test_layers_that_are_no_list_are_refused_by_name() -> None:
    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        @property
        def layers(self) -> list[nn.Module]:
            return [self.a, self.b]

    with pytest.raises(UnsupportedModelError, match="the layers of scattered stand in 0 lists"):
        first_layers(Scattered(), 1, "scattered")
