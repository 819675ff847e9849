"""How a checkpoint's weights are packed, by its config, and which backend reads that.

What no class is known to unpack is refused before any weight is read: codes that are taken for numbers, or
for another method's codes, need not be an error to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_mlx.errors import UnsupportedModelError, shown

Config = Mapping[str, Any]

_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "fp8": "FP8", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "mlx": "MLX"}
_TORCH_READS = {"mxfp4"}  # unpacked as it is read; the other methods want packages that are not ours
_MLX_READS = {"mlx", "awq", "mxfp4", "mxfp8", "modelopt", "bitnet"}
# Of these two, model types whose classes in mlx-lm unpack it, or turn it into MLX's own form.
_DEEPSEEK = ("deepseek_v3", "joyai_llm_flash", "kimi_k2", "kimi_k25")
_MISTRAL = ("mistral3", "mistral4")
MLX_UNPACKS = {
    "compressed-tensors": {*_DEEPSEEK, *_MISTRAL, "kimi_k3"},
    "fp8": {
        *_DEEPSEEK,
        *_MISTRAL,
        *("deepseek_v32", "deepseek_v41", "deepseek_v41_text", "glm_moe_dsa", "mimo_v2_flash"),
        *("minimax", "minimax_m2", "minimax_m3_vl", "ministral3"),
    },
}
_COMPRESSED = {"pack-quantized": 4, "mxfp4-pack-quantized": 4, "nvfp4-pack-quantized": 4}  # bits, as mlx-lm
_ALLOWED = {
    "mlx": "allowed on MLX: packed for MLX, by AWQ in 4 bits or as MXFP4, or float32, float16 or bfloat16 "
    "weights",
    "torch": "allowed on torch: float32, float16 or bfloat16 weights, MXFP4, and GGUFs",
}


class Packing(NamedTuple):
    """`method` as configs call it, "mlx" for MLX's own, "" where the config does not say; `bits` of a code
    that is packed into integers, None where there are none."""

    method: str
    bits: int | None
    format: str = ""  # of compressed-tensors, a container of several, and of FP8's scales

    @property
    def name(self) -> str:
        name = _NAMES.get(self.method) or (shown(self.method) if self.method else "a method it does not name")
        return self.method if self.method in ("bitsandbytes", "compressed-tensors") else name

    def unpacked_by(self, backend: str) -> bool:
        """Whether a backend makes 16-bit numbers of the codes as it reads them."""
        if backend == "torch":
            return self.method in _TORCH_READS
        return self.method == "fp8" and self.format != "ue8m0"


def packing_of(config: Config) -> Packing | None:
    """None where weights are numbers."""
    if said := config.get("quantization"):
        return Packing("mlx", _bits(said))
    said = config.get("quantization_config")
    if said is None and isinstance(text := config.get("text_config"), dict):
        said = text.get("quantization_config")
    if not said:
        return None
    if not isinstance(said, dict):
        return Packing(str(said)[:200], None)
    method = said.get("quant_method")
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        method = "bitsandbytes"
    if method == "compressed-tensors":
        kind = str(said.get("format"))
        return Packing(method, _COMPRESSED.get(kind), kind)
    if method == "fp8":  # scales that are powers of two, 32 numbers each, are MLX's own MXFP8
        return Packing(method, None, str(said.get("scale_fmt") or ""))
    four = method == "mxfp4" or (method == "awq" and "bits" not in said)  # as mlx-lm takes it
    return Packing(str(method or "")[:200], 4 if four else _bits(said))


def check_packing(config: Config, backend: str, where: Path) -> None:
    """Whether a backend reads weights of that form.

    Args:
        backend: mlx or torch.

    Raises:
        UnsupportedModelError: it does not.
    """
    packing = packing_of(config)
    if packing is None or _reads(backend, packing, config):
        return
    by = "for MLX" if packing.method == "mlx" else f"by {packing.name}"
    if packing.method == "compressed-tensors":
        by += f" ({shown(packing.format)})"
    if packing.method == "awq" and backend == "mlx":
        by += f" in {packing.bits or '?'} bits"
    on_mlx = backend == "torch" and _reads("mlx", packing, config)
    raise UnsupportedModelError(
        f"{where} is packed {by}, which {'mlx-lm' if backend == 'mlx' else 'torch'} cannot read",
        _ALLOWED[backend],
        f"take the model it was made of, or {'--backend mlx' if on_mlx else 'a GGUF of it'}",
    )


def _reads(backend: str, packing: Packing, config: Config) -> bool:
    if backend == "torch":
        return packing.method in _TORCH_READS
    if packing.method == "awq":
        return packing.bits == 4
    if types := MLX_UNPACKS.get(packing.method):
        known = packing.method != "compressed-tensors" or packing.format in _COMPRESSED
        return known and config.get("model_type") in types
    return packing.method in _MLX_READS


def _bits(said: object) -> int | None:
    bits = said.get("bits") if isinstance(said, dict) else None
    return bits if type(bits) is int and 0 < bits <= 8 else None
