"""Llama GGUFs as checkpoints: config, refusals of what needs other arithmetic, RoPE tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrum_mlx.catalog import ResolvedModel
from ferrum_mlx.errors import ModelFileError, UnsupportedModelError
from ferrum_mlx.gguf import GGUFFile
from ferrum_mlx.gguf_llama import hf_config, row_order, tensors_by_weight

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
        ({"general.architecture": "qwen2"}, "'qwen2'.*'llama'"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
        ({"llama.attention.value_length": 8}, "value_length is 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
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
    heads, kv_heads, head_dim = 4, 2, 6
    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    for name, count in (("blk.0.attn_q.weight", heads), ("blk.0.attn_k.weight", kv_heads)):
        rows = np.arange(count * head_dim)
        # what llama.cpp's converter does to a checkpoint's rows
        stored = rows.reshape(count, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
        order = row_order(name, config)
        assert order is not None
        assert list(stored[order]) == list(rows)
        assert list(stored) != list(rows)
    assert row_order("blk.0.attn_v.weight", config) is None


@pytest.mark.parametrize(
    "stray", ["blk.2.attn_q.weight", "blk.00.attn_q.weight", "blk.0.attn_q.bias", "blk.0.attn_z.weight", "x"]
)
def test_a_stray_tensor_is_named(stray: str, tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "m.gguf", extra={stray: np.zeros(4, np.float32)})
    file = GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=f"'{stray}'"):
        tensors_by_weight(file, hf_config(file))
