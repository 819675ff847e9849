"""What each attention call of a model keeps and sees, found out by running it on a few tokens.

Nothing here knows an architecture: the model's own calls say which layers attend, with which keys,
and the masks it asks for say how far back they see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache

from ferrum_mlx import nearties
from ferrum_mlx.backends.torch.device import dtype_name, without_cpu_kernel
from ferrum_mlx.backends.torch.weights import has_packed
from ferrum_mlx.errors import FerrumError, UnsupportedModelError, one_line
from ferrum_mlx.kv.precision import head_bytes
from ferrum_mlx.kv.sequence import KVGroup

Shape = tuple[int, int]  # kv_heads, head_dim
MaskRule = Callable[..., torch.Tensor]  # (batch, head, query position, key position) → may it see it

INSPECT = "ferrum_inspect"  # attention and masks are recorded
ROWS = "ferrum_rows"  # attention is a function of each row alone, and no mask is made
TOKENS = 3
FAR = 1 << 20  # positions that a mask is looked at on, unless the model's own limit is nearer
_PLAIN_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # of past keys and values, and nothing else
_HARMLESS = {"position_ids", "cache_position"}  # tensors that an attention function may ignore


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one attention call, as the model itself hands them over.

    They are kept in `kept`, None is `dtype`; or `bits` of a number are, None is all.
    """

    window: int | None
    key_shape: Shape
    value_shape: Shape
    dtype: torch.dtype
    bits: int | None = None
    kept: torch.dtype | None = None

    @property
    def bytes_per_token(self) -> int:
        shapes = self.key_shape, self.value_shape
        itemsize = (self.kept or self.dtype).itemsize
        return sum(heads * head_bytes(dim, self.bits, itemsize) for heads, dim in shapes)


@dataclass(frozen=True, slots=True)
class Inspection:
    """`layers` are in the order in which the model attends."""

    layers: tuple[LayerKV, ...]
    vocab_size: int


class _Recorder:
    """Keeps what a model's attention calls and masks were during one forward."""

    def __init__(self, model: PreTrainedModel, model_type: str, kv_bits: int | None) -> None:
        self._model_type, self._kv_bits = model_type, kv_bits
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._far = min(limit or FAR, FAR)
        self._windows: list[tuple[torch.Tensor, int | None]] = []  # mask, what it means
        self.layers: list[LayerKV] = []

    def mask(self, rule: MaskRule, mask: torch.Tensor) -> torch.Tensor:
        self._windows.append((mask, _window_of(rule, self._far)))
        return mask

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        others: dict[str, object],
    ) -> None:
        call = f"attention call {len(self.layers)}"
        shape = (1, TOKENS)
        if any((array.shape[0], array.shape[2]) != shape for array in (query, key, value)):
            raise self._refused(f"{call} is not over the tokens themselves, one row each")
        for name, given in others.items():
            if isinstance(given, torch.Tensor) and name not in _HARMLESS:
                raise self._refused(f"{call} is handed {name}, whose meaning is not known here")
        window = next((window for known, window in self._windows if known is mask), 0)
        if window == 0:
            raise self._refused(f"{call} sees other keys than all the earlier ones or a window of them")
        kept = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        self.layers.append(LayerKV(window, *kept, key.dtype, self._kv_bits))

    def _refused(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._model_type}: {what}",
            "supported: causal self-attention, full or with a sliding window",
            "choose another model",
        )


_recorder: ContextVar[_Recorder] = ContextVar("the inspection that runs in this thread")


def row_by_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Stands in for attention: each row's output follows from its own q, k and v alone."""
    groups = query.shape[1] // key.shape[1]
    own, kept = (array.repeat_interleave(groups, dim=1) for array in (key, value))
    # no product of q and k: at one position it would not show how they are turned
    score = (query + 0.5 * own).sum(dim=-1, keepdim=True) * query.shape[-1] ** -0.5
    return (kept * (1 + torch.tanh(score))).transpose(1, 2).contiguous()


def _inspect(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    _recorder.get().call(query, key, value, attention_mask, others)
    return row_by_row(query, key, value), None


def _inspect_mask(q_length: int, kv_length: int, mask_function: MaskRule, **_: object) -> torch.Tensor:
    return _recorder.get().mask(mask_function, torch.ones(1, 1, q_length, kv_length, dtype=torch.bool))


def _rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, None]:
    return row_by_row(query, key, value), None


AttentionInterface.register(INSPECT, _inspect)
AttentionMaskInterface.register(INSPECT, _inspect_mask)
AttentionInterface.register(ROWS, _rows)


def _window_of(rule: MaskRule, far: int) -> int | None:
    """The window that a mask means, None for full causal attention, 0 for anything else."""
    zero, keys = torch.tensor(0), torch.arange(far)

    def seen(position: int) -> torch.Tensor:
        return rule(zero, zero, torch.tensor([position]), keys).reshape(-1).expand(far)

    window = int(seen(far - 1).sum())
    turns = (window - 1, window, window + 1, 2 * window)
    for position in {0, 1, far // 2 + 1, far // 3, far - 2, far - 1, *turns}:
        expected = (keys <= position) & (keys > position - window)
        if 0 <= position < far and not torch.equal(seen(position), expected):
            return 0
    return None if window >= far else window


def inspect_layers(
    model: PreTrainedModel, model_type: str, max_len: int, kv_bits: int | None = None, *, half: bool = True
) -> Inspection:
    """Run a few tokens with a recorder in attention's place.

    Args:
        max_len: positions below it must turn as they do alone.
        kv_bits: that our pools keep of a number.
        half: pools may keep float16, where that pays.

    Raises:
        UnsupportedModelError: a layer keeps something else than keys and values of past tokens, does
            not attend through transformers' attention interface, or lets rows of a batch see each other.
    """
    _check_kind(model, model_type)
    recorder = _Recorder(model, model_type, kv_bits)
    token = _recorder.set(recorder)
    own = model.config._attn_implementation
    try:
        logits = _run(model, recorder, model_type, max_len)
    except FerrumError:
        raise
    except Exception as error:  # whatever an architecture does with an attention it does not expect
        raise UnsupportedModelError(f"{model_type} does not run here: {one_line(error)}") from error
    finally:
        model.set_attn_implementation(own)
        _recorder.reset(token)
    kept = _kept(model) if half and not kv_bits else None
    return Inspection(tuple(replace(layer, kept=kept) for layer in recorder.layers), logits.shape[-1])


def _kept(model: PreTrainedModel) -> torch.dtype | None:
    """float16 where weights are packed, which changes K and V by more, and there is a kernel that reads it:
    on a CPU attention takes as long as reading them."""
    if not has_packed(model) or without_cpu_kernel():
        return None
    from ferrum_mlx.backends.torch.cpu_kernel import reads_half

    return torch.float16 if reads_half() else None


@torch.inference_mode()
def _run(model: Any, recorder: _Recorder, model_type: str, max_len: int) -> torch.Tensor:
    ids = torch.arange(TOKENS, device=model.device)[None]
    _check_caches(model(input_ids=ids, use_cache=True), model_type)
    model.set_attn_implementation(INSPECT)
    logits: torch.Tensor = model(input_ids=ids, position_ids=ids, use_cache=False).logits
    if not recorder.layers:
        raise _not_through_interface(model_type)
    model.set_attn_implementation(ROWS)
    positions = torch.tensor([[max_len - 1, 1, max_len // 2]], device=model.device)
    packed = has_packed(model)
    tolerance = nearties.SAME_PRODUCTS if packed else nearties.tolerance(dtype_name(model.dtype))
    together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    for row in range(TOKENS):
        at = slice(row, row + 1)
        alone = model(input_ids=ids[:, at], position_ids=positions[:, at], use_cache=False).logits[0, 0]
        apart = (together[row] - alone).abs().max()
        if not apart <= tolerance * max(1.0, float(alone.abs().max())):
            raise UnsupportedModelError(
                f"{model_type} lets tokens of a batch change each other outside of attention, or counts "
                "positions itself",
                "supported: layers that treat each token by itself",
                "choose another model",
            )
    return logits


def _check_kind(model: PreTrainedModel, model_type: str) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{model_type} is an encoder with a decoder, which attends across sequences",
            next_step="choose another model",
        )
    if not model._can_set_attn_implementation():
        raise _not_through_interface(model_type)


def _not_through_interface(model_type: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model_type} does not attend through transformers' attention interface",
        next_step="choose another model",
    )


def _check_caches(output: Any, model_type: str) -> None:
    """The model's own cache says which layers keep more than keys and values."""
    cache = next((value for value in output.values() if isinstance(value, Cache)), None)
    kinds = [] if cache is None else [type(layer).__name__ for layer in cache.layers]
    for index, kind in enumerate(kinds):
        if kind not in _PLAIN_CACHES:
            raise UnsupportedModelError(
                f"layer {index} of {model_type} keeps a {kind}: a recurrent state, or an index",
                "supported on torch: keys and values of past tokens",
                "choose another model",
            )
    if not kinds:
        raise UnsupportedModelError(
            f"{model_type} keeps no cache of keys and values", next_step="choose another model"
        )


def group_layers(layers: Sequence[LayerKV]) -> list[KVGroup]:
    """Layers of equal window and bytes a token share a pool."""
    members: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault((layer.window, layer.bytes_per_token), []).append(index)
    return [
        KVGroup(layers=tuple(indices), window=window, bytes_per_token=size * len(indices))
        for (window, size), indices in members.items()
    ]


def rope_ceiling(model: PreTrainedModel) -> int | None:
    """Most tokens of a sequence such that no rotary embedding looks at the longest one of the batch.

    LongRoPE and dynamic NTK change the angles of every row once any row is past the original length.
    """
    ceilings: list[int] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        rules = getattr(config, "rope_parameters", None) or {}
        nested = [rule for rule in rules.values() if isinstance(rule, dict)] or [rules]
        for rule in nested if hasattr(module, "rope_type") else []:
            if "dynamic" in rule["rope_type"]:
                ceilings.append(config.max_position_embeddings)
            elif rule["rope_type"] == "longrope":
                ceilings.append(rule["original_max_position_embeddings"])
    return min(ceilings, default=None)
