"""mlx-lm beside this engine: `generate` for one stream, `BatchGenerator` for several.

It gets the very model object that our MLX backend loaded. On a CPU its layers therefore multiply through
numpy's BLAS, as ours do, and its attention is given that route here: what is left of a ratio is the
engine's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step

from ferrum_mlx.bench.trace import Stream, Trace
from ferrum_mlx.bench.workloads import Arrival, Arriving, Case
from ferrum_mlx.errors import FerrumError

if TYPE_CHECKING:
    from ferrum_mlx.bench.peers import Setting

_ATTENTION = "scaled_dot_product_attention"
_STREAMS = 32  # that BatchGenerator decodes at once, unless a case has more


class MLXLM:
    name = "mlx-lm"

    def __init__(self, model: nn.Module, *, blas: bool, same_weights: bool) -> None:
        self._model, self._blas = model, blas
        self.same_weights = same_weights

    def method(self, case: Case) -> str:
        return "generate" if case.streams == 1 else "BatchGenerator"

    def refusal(self, case: Case) -> str:
        if case.kind == "pp" and case.depth:
            return "it keeps no KV between requests, so it has no depth to start from"
        return ""

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        mx.reset_peak_memory()
        with blas_attention() if self._blas else nullcontext():
            run = self._alone(arrivals) if case.streams == 1 else self._batched(case, arrivals)
        run.peak_memory_bytes = mx.get_peak_memory()
        return run

    def close(self) -> None:
        self._model = nn.Module()

    def _alone(self, arrivals: Sequence[Arrival]) -> Trace:
        run, arriving = Trace(), Arriving(arrivals)
        while due := arriving.due(run, perf_counter()):
            for arrival, stream in due:
                prompt = mx.array(stream.prompt)
                for token, _ in generate_step(prompt, self._model, max_tokens=arrival.max_tokens):
                    stream.add(perf_counter(), [int(token)])
                stream.ended = True
        return run

    def _batched(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        run, arriving = Trace(), Arriving(arrivals)
        generator = BatchGenerator(self._model, completion_batch_size=max(_STREAMS, case.streams + 1))
        open_streams: dict[int, Stream] = {}
        try:
            while True:
                due = arriving.due(run, perf_counter())
                if due:
                    prompts = [stream.prompt for _, stream in due]
                    uids = generator.insert(prompts, [arrival.max_tokens for arrival, _ in due])
                    open_streams |= dict(zip(uids, (stream for _, stream in due), strict=True))
                if not open_streams:
                    break
                _, responses = generator.next()
                now = perf_counter()
                for response in responses:
                    stream = open_streams[response.uid]
                    stream.add(now, [int(response.token)])
                    if response.finish_reason:
                        stream.ended = True
                        del open_streams[response.uid]
                if case.until_first_end and len(open_streams) < len(run.streams):
                    break
        finally:
            generator.close()
        if arriving and not case.until_first_end:
            raise FerrumError("a request of the workload was never due")
        return run


def mlx_lm_peer(setting: Setting) -> MLXLM:
    from ferrum_mlx.backends.mlx import device as devices
    from ferrum_mlx.backends.mlx.executor import MLXExecutor

    executor = setting.subject.executor
    if isinstance(executor, MLXExecutor):
        blas = executor.info.device == "cpu" and executor.info.dtype == "float32"
        return MLXLM(executor.model, blas=blas, same_weights=True)
    from ferrum_mlx.backends.mlx.host_layers import use_host_layers
    from ferrum_mlx.backends.mlx.loader import load_model

    device = devices.select(setting.config.device)
    model, _ = load_model(setting.resolved(), quantized=not device.host)
    if device.host:
        devices.to_float32(model)
        use_host_layers(model, exact=False)
    mx.eval(model.parameters())
    return MLXLM(model, blas=device.host, same_weights=executor.info.rounding == "float32" and device.host)


@contextmanager
def blas_attention() -> Iterator[None]:
    """mlx-lm's attention through numpy, in every model module that has it by name."""
    places = [
        (vars(module), vars(module)[_ATTENTION])
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm.models.") and _ATTENTION in vars(module)
    ]
    for names, original in places:
        names[_ATTENTION] = _through_blas(original)
    try:
        yield
    finally:
        for names, original in places:
            names[_ATTENTION] = original


def _through_blas(original: Any) -> Any:
    def attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        plain = isinstance(keys, mx.array) and keys.dtype == queries.dtype == mx.float32
        if not plain or sinks is not None:
            own: mx.array = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
            return own
        hidden = mask if mask is None or isinstance(mask, str) else np.asarray(mask)
        return mx.array(attend(np.asarray(queries) * scale, np.asarray(keys), np.asarray(values), hidden))

    return attention


def attend(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | str | None
) -> np.ndarray:
    """softmax(q · k) · v.

    Args:
        queries: [batch, heads, rows, head_dim], scaled; heads is a multiple of kv_heads.
        keys, values: [batch, kv_heads, length, head_dim].
        mask: "causal"; bool, True where a row sees a key; or what is added; None sees all. An array
            broadcasts to [batch, heads, rows, length].
    """
    batch, heads, rows, head_dim = queries.shape
    kv_heads, length = keys.shape[1:3]
    groups = heads // kv_heads
    by_head = queries.reshape(batch, kv_heads, groups * rows, head_dim)
    scores = by_head @ keys.swapaxes(-1, -2)  # [batch, kv_heads, groups · rows, length]
    if mask is not None:
        if isinstance(mask, str):
            mask = np.arange(length) <= np.arange(length - rows, length)[:, None]
        shaped = scores.reshape(batch, kv_heads, groups, rows, length)
        if mask.ndim > 3:  # [batch or 1, heads or 1, rows or 1, length] → a head of each group
            whole = mask.shape[1] == heads
            mask = mask.reshape(len(mask), kv_heads if whole else 1, groups if whole else 1, *mask.shape[2:])
        if mask.dtype == np.bool_:
            np.copyto(shaped, np.finfo(np.float32).min, where=~mask)
        else:
            shaped += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    out: np.ndarray = scores @ values
    out /= total
    return out.reshape(batch, heads, rows, -1)
