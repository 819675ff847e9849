"""GGUFs as checkpoints: config, refusals of what needs other arithmetic, RoPE tables."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_config import hf_config
from ferrum_mlx.gguf_weights import GGUFWeights, row_order

from . import tiny_models as tiny
from .tiny_ggufs import write_gguf as convert

Write = Callable[..., dict[str, np.ndarray]]


def test_config_of_the_default_model(smollm2: ResolvedModel) -> None:
    config = hf_config(GGUFFile(smollm2.path))
    facts = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2],
    }
    assert {key: config[key] for key in facts} == facts
    assert config["rms_norm_eps"] == pytest.approx(1e-5, rel=1e-6)


def test_eos_is_the_union_of_what_the_file_names(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(
        tmp_path / "m.gguf", metadata={"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    )
    assert hf_config(GGUFFile(tmp_path / "m.gguf"))["eos_token_id"] == [2, 7]


def test_an_output_matrix_means_untied_embeddings(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", tied=False)
    assert hf_config(GGUFFile(tmp_path / "m.gguf"))["tie_word_embeddings"] is False


def test_head_size_is_read_not_derived(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", head_dim=32)
    config = hf_config(GGUFFile(tmp_path / "m.gguf"))
    assert (config["head_dim"], config["hidden_size"] // config["num_attention_heads"]) == (32, 16)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, "'mamba'.*: llama, qwen2, qwen3, gemma2, gemma3, phi3"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "log_multiplier is 0.1",
        ),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"llama.logit_scale": 8.0}, "logit_scale is 8.0"),
    ],
)
def test_variants_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path, write_gguf: Write
) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=changes)
    with pytest.raises(UnsupportedModelError, match=named):
        hf_config(GGUFFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    "changes",
    [
        {"llama.block_count": 0},
        {"llama.block_count": "two"},
        {"llama.block_count": None},
        {"llama.block_count": 2**31 - 1},
        {"llama.attention.head_count": 2**30, "llama.attention.key_length": 2**30},
        {"llama.attention.head_count_kv": 3},
        {"llama.embedding_length": 128},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        {"llama.rope.freq_base": 0.0},
    ],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=changes)
    with pytest.raises((ModelFileError, UnsupportedModelError)):
        hf_config(GGUFFile(tmp_path / "m.gguf"))


def test_linear_rope_scaling(tmp_path: Path, write_gguf: Write) -> None:
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", metadata=changes)
    assert hf_config(GGUFFile(tmp_path / "m.gguf"))["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_a_stored_llama3_table_is_recognized_and_gives_mlx_lms_frequencies(
    tmp_path: Path, write_gguf: Write
) -> None:
    import mlx.core as mx
    from mlx_lm.models.rope_utils import Llama3RoPE

    theta, dims = 500000.0, 16
    rule = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reference = Llama3RoPE(
        dims, base=theta, scaling_config={**rule, "original_max_position_embeddings": 8192}
    )
    plain = theta ** (mx.arange(0, dims, 2) / dims)
    table = np.array(reference._freqs / plain)
    assert 1.0 < table[table > 1.0].min() < 32.0 == table.max()  # plain, between and scaled frequencies
    changes = {"llama.rope.freq_base": theta}
    write_gguf(tmp_path / "m.gguf", metadata=changes, extra={"rope_freqs.weight": table})
    scaling = hf_config(GGUFFile(tmp_path / "m.gguf"))["rope_scaling"]
    assert scaling == {"rope_type": "llama3", "original_max_position_embeddings": 8192, **rule}

    write_gguf(tmp_path / "other.gguf", metadata=changes, extra={"rope_freqs.weight": table * 1.01})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        hf_config(GGUFFile(tmp_path / "other.gguf"))


def test_row_order_undoes_the_converters_permutation() -> None:
    heads, head_dim = 4, 6
    rows = np.arange(heads * head_dim)
    # what llama.cpp's converter does to a checkpoint's rows
    stored = rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
    assert list(stored[row_order(heads, head_dim)]) == list(rows)
    assert list(stored) != list(rows)


@pytest.mark.parametrize(
    "stray",
    ["blk.2.attn_q.weight", "blk.00.attn_q.weight", "blk.0.attn_norm.bias", "blk.0.attn_z.weight", "x"],
)
def test_a_stray_tensor_is_named(stray: str, tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", extra={stray: np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match=f"'{stray}'"):
        GGUFWeights(GGUFFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("qwen2", {"attention.key_length": 32}, "key_length is 32"),
        ("phi3/longrope", {"rope.scaling.attn_factor": 1.0}, "attn_factor is 1.0"),
        ("qwen2/yarn", {"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor is 0.5"),
    ],
)
def test_variants_of_other_families_are_refused(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = tiny.CONFIGS[name]
    convert(tmp_path / "m.gguf", name, config, tiny.weights(name, config), changes=changes)
    with pytest.raises(UnsupportedModelError, match=named):
        GGUFWeights(GGUFFile(tmp_path / "m.gguf"))


def test_a_gemma3_without_a_window_has_full_attention_throughout(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["gemma3"], "sliding_window": None}
    convert(tmp_path / "m.gguf", "gemma3", config, tiny.weights("gemma3", config))
    found = GGUFWeights(GGUFFile(tmp_path / "m.gguf")).config
    assert (found["sliding_window_pattern"], "sliding_window" in found) == (1, False)


def test_the_largest_gemmas_have_a_scale_of_their_own(tmp_path: Path) -> None:
    for layers, scalar in ((45, 32), (46, tiny.HIDDEN // tiny.HEADS)):
        config = {**tiny.CONFIGS["gemma2"], "num_hidden_layers": layers}
        convert(tmp_path / "m.gguf", "gemma2", config, tiny.weights("gemma2", config))
        assert GGUFWeights(GGUFFile(tmp_path / "m.gguf")).config["query_pre_attn_scalar"] == scalar


def test_a_beginning_or_padding_that_is_no_token_is_none(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "bos_token_id": tiny.VOCAB}
    arrays = tiny.weights("llama", config)
    convert(tmp_path / "m.gguf", "llama", config, arrays)
    found = GGUFWeights(GGUFFile(tmp_path / "m.gguf")).config
    assert (found["bos_token_id"], found["pad_token_id"]) == (None, None)


ODD = {
    "a list": np.array([1, 2], np.uint32),
    "no numbers": ["x", "y"],
    "a text": "x",
    "no number": float("nan"),
    "minus one": -1,
    "the largest": 2**31 - 2,
    "yes": True,
}


@pytest.mark.parametrize("name", ["llama/llama3", "qwen2/yarn", "gemma2", "gemma3", "phi3/longrope"])
def test_odd_metadata_is_a_config_or_one_clear_error(name: str, tmp_path: Path) -> None:
    config = tiny.CONFIGS[name]
    convert(tmp_path / "m.gguf", name, config, tiny.weights(name, config))
    file = GGUFFile(tmp_path / "m.gguf")
    sound = dict(file.metadata)
    keys = [key for key in sound if key.startswith(f"{tiny.family(name)}.")]
    refused = 0
    for odd in ODD.values():
        for key in keys:
            file.metadata = {**sound, key: odd}
            try:
                hf_config(file)
            except (ModelFileError, UnsupportedModelError):
                refused += 1
    file.metadata = sound
    assert hf_config(file)["model_type"] == config["model_type"]
    assert refused > len(keys)


@pytest.mark.parametrize("size", [2**27, 2**31 - 2])
def test_sizes_that_agree_with_each_other_make_no_table(size: int, tmp_path: Path) -> None:
    """A table of RoPE's factors is checked against the one stored: none is made for a size that is a lie."""
    config = tiny.CONFIGS["llama/llama3"]
    lie = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
    arrays = tiny.weights("llama/llama3", config)
    convert(tmp_path / "m.gguf", "llama/llama3", config, arrays, changes=lie)
    file = GGUFFile(tmp_path / "m.gguf")
    tracemalloc.start()
    with pytest.raises(ModelFileError, match=rf"rope_freqs.weight has shape \(16,\); \({size // 2},\)"):
        hf_config(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["llama/llama3", "phi3/longrope"])
def test_factors_that_are_no_factors(
    name: str, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.CONFIGS[name]
    convert(tmp_path / "m.gguf", name, config, tiny.weights(name, config))
    file = GGUFFile(tmp_path / "m.gguf")
    table = next(key for key in file.tensors if key.startswith("rope_"))
    read = file.read

    def damaged(key: str) -> np.ndarray:
        values = read(key)
        return np.append(values[:-1], np.float32(factor)) if key == table else values

    monkeypatch.setattr(file, "read", damaged)
    with pytest.raises(ModelFileError, match=f"{table} holds factors that are not positive numbers"):
        hf_config(file)
