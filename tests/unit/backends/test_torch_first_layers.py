"""A model's first layers as a model of their own, on torch: the weights are shared, nothing else is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from transformers import LlamaConfig, LlamaForCausalLM

from ferrum_mlx.backends.torch.first_layers import first_layers
from ferrum_mlx.errors import UnsupportedModelError

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def test_embedding_first_layers_norm_and_head(model: LlamaForCausalLM) -> None:
    logits = first_layers(model, 2, "llama")(input_ids=IDS).logits
    hidden = model(input_ids=IDS, output_hidden_states=True).hidden_states[2]
    assert torch.allclose(logits, model.lm_head(model.model.norm(hidden)), atol=1e-6)


@torch.inference_mode()
def test_weights_are_the_same_tensors_and_modules_are_not(model: LlamaForCausalLM) -> None:
    twin = first_layers(model, 3, "llama")
    assert (len(twin.model.layers), len(model.model.layers)) == (3, 4)
    for own, other in zip(twin.model.layers, model.model.layers[:3], strict=True):
        assert own is not other
        assert own.self_attn.q_proj.weight is other.self_attn.q_proj.weight
    before = model(input_ids=IDS).logits
    twin.set_attn_implementation("eager")
    twin.model.layers[0].mlp = torch.nn.Identity()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=IDS).logits, before)


def test_layers_that_cannot_be_told_are_refused_by_name(model: LlamaForCausalLM) -> None:
    model.model.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
    with pytest.raises(UnsupportedModelError, match="2 lists of llama have as many modules as it has layers"):
        first_layers(model, 1, "llama")
