"""What device_check.py measures: kinds of layers through the kernel, bandwidth, and decode speed by route."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    from ferrum_mlx.backends.torch.executor import TorchExecutor

STREAMS = (1, 32)
ROUTES = ("kernel, graphs", "kernel", "gather")
COMPILED = "kernel, graphs, compiled"  # what it is worth is asked here; no engine takes it yet
COMPILE_ROOM = 120.0  # seconds that must be left to try that
PROMPT = 64  # tokens of each stream before it decodes
WARM = 8  # output tokens of a stream before time counts
GPU_TOKENS, CPU_TOKENS = 192, 40  # of each stream
SHORT = 0.4  # of those for routes that only stand beside the first one
CPU_CONTEXTS = (1, 16, 83, 0)  # Triton's interpreter is slow
RUN_ROOM = 25.0  # seconds that must be left for another run
BUFFER_BYTES = 4 << 30
_PASSES = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attention layer."""

    dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        extras = [f"window {self.window}"] if self.window else []
        extras += [f"softcap {self.softcap:g}"] if self.softcap else []
        shape = f"{self.heads}/{self.kv_heads} heads of {self.key_dim}/{self.value_dim}"
        return " ".join([self.dtype, shape, *extras, *["sinks"] * self.sinks])


KINDS = (
    Kind(),
    Kind("float16", 32, 8, 128, 128),
    Kind("bfloat16", 32, 8, 128, 128),
    Kind("bfloat16", 24, 8, 128, 128, window=512),
    Kind("bfloat16", 64, 8, 64, 64, window=128, sinks=True),
    Kind("bfloat16", 8, 4, 256, 256, softcap=50.0),
    Kind("bfloat16", 14, 2, 64, 64),
    Kind("bfloat16", 16, 16, 192, 128),
)


def facts() -> dict[str, object]:
    import torch

    found: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "not installed"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "memory_gb": round(properties.total_memory / 1e9)}
        found |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
    return found


def kernel_difference(kind: Kind) -> str | None:
    """Why the kernel is wrong for a kind of layer; None if it is right."""
    import torch

    from ferrum_mlx.backends.torch.layers import LayerKV
    from ferrum_mlx.backends.torch.paged_check import CONTEXTS, difference
    from ferrum_mlx.backends.torch.paged_kernel import TritonAttention
    from ferrum_mlx.backends.torch.tables import How, TableStorage

    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = (kind.kv_heads, kind.key_dim), (kind.kv_heads, kind.value_dim)
    storage = TableStorage(0, 16, LayerKV(kind.window, *shapes, getattr(torch, kind.dtype)), place)
    sinks = torch.randn(kind.heads, device=place) if kind.sinks else None
    storage.asked = kind.heads, How(kind.key_dim**-0.5, kind.window, kind.softcap, sinks)
    contexts = CONTEXTS if place.type == "cuda" else CPU_CONTEXTS
    reason: str | None = difference(TritonAttention(256), storage, contexts)
    return reason


def bandwidth() -> float:
    """GB/s of the GPU: the better of reading a large buffer and of copying it, where a byte counts twice."""
    import torch

    size = min(BUFFER_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(size // 4, device="cuda")
    target = torch.empty_like(source)
    best = max(
        size / min(_seconds(lambda: source.sum()) for _ in range(_PASSES)),
        2 * size / min(_seconds(lambda: target.copy_(source)) for _ in range(_PASSES)),
    )
    return float(best) / 1e9


def _seconds(work: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def all_runs(on_gpu: bool, left: Callable[[], float], runs: list[dict[str, Any]]) -> None:
    """Every route by every number of streams, as long as time is left; `runs` has them as they end."""
    executor = _executor(on_gpu)
    for route, tokens in _routes(executor, on_gpu, left):
        for streams in STREAMS:
            if left() < RUN_ROOM:
                break
            runs.append({"route": route, "streams": streams, **_decode(executor, streams, tokens)})
    executor.shutdown()


def _routes(executor: TorchExecutor, on_gpu: bool, left: Callable[[], float]) -> Iterator[tuple[str, int]]:
    """Each route with its number of tokens, the executor being on it; those it is not on are passed over."""
    tokens = GPU_TOKENS if on_gpu else CPU_TOKENS
    off = " ".join(executor.capabilities().off)
    if "captured" not in off:
        yield ROUTES[0], tokens
    executor.slow_down(kernel=False)
    if "kernel" not in off:
        yield ROUTES[1], int(tokens * SHORT)
    executor.slow_down(kernel=True)
    yield ROUTES[2], int(tokens * SHORT)
    if on_gpu and not off and left() > COMPILE_ROOM and _compiles(executor):
        yield COMPILED, tokens


def _compiles(executor: TorchExecutor) -> bool:
    import torch

    from ferrum_mlx.backends.torch.capture import CUDACapture
    from ferrum_mlx.backends.torch.paged_check import triton_kernel

    started = perf_counter()
    executor.speed_up(lambda: triton_kernel(torch.device("cuda")), CUDACapture(), compiled=True)
    executor.kv.forget_prefixes()  # the checks' own prompts
    reason = " ".join(executor.capabilities().off)
    click.echo(f"compiling: {reason or 'done'} ({perf_counter() - started:.0f} s)")
    return not reason


def _executor(on_gpu: bool) -> TorchExecutor:
    """A Llama with random weights: of 3 or 1 billion parameters by what the GPU has room for, or tiny."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ferrum_mlx.backends.torch.executor import TorchExecutor
    from ferrum_mlx.backends.torch.tables import attend
    from ferrum_mlx.config import EngineConfig
    from ferrum_mlx.model_info import ModelInfo

    free = torch.cuda.mem_get_info()[0] if on_gpu else 2**28
    hidden, layers, heads, kv_heads, inner = (
        (64, 2, 4, 2, 128)
        if not on_gpu
        else (3072, 28, 24, 8, 8192)
        if free > 16 << 30
        else (2048, 16, 32, 8, 8192)
    )
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=128256 if on_gpu else 512,
        max_position_embeddings=4096,
        tie_word_embeddings=True,  # a step then reads every weight once
    )
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = str(model.dtype).removeprefix("torch.")
    info = ModelInfo(
        model_id="random llama",
        model_type="llama",
        num_parameters=parameters,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=0,
        vocab_size=0,
        max_sequence_length=4096,
        dtype=name,
        device="cuda" if on_gpu else "cpu",
    )
    settings = EngineConfig(
        max_model_len=4096 if on_gpu else 128,
        kv_memory=None if on_gpu else 4 << 20,
        max_num_seqs=max(STREAMS),
        max_num_batched_tokens=2048,
    )
    executor = TorchExecutor(model, info, settings, free_memory=free // 2)
    executor.prepare_startup()
    if not on_gpu:  # what a GPU does by itself, but for the kernel and the capture
        executor.speed_up(lambda: attend, lambda run: run)
        executor.kv.forget_prefixes()
    return executor


def _decode(executor: TorchExecutor, streams: int, tokens: int) -> dict[str, Any]:
    """Tokens a second of all streams together, from when all of them are under way until one ends."""
    from ferrum_mlx.backends.fake import FakeCodec
    from ferrum_mlx.config import EngineConfig
    from ferrum_mlx.engine import Engine
    from ferrum_mlx.messages import Delta, Failed, Submit
    from ferrum_mlx.sampling import SamplingParams

    config = EngineConfig(max_num_seqs=max(STREAMS), max_num_batched_tokens=2048, max_prefill_chunk=2048)
    engine = Engine(executor, FakeCodec(), config, backend="torch", backend_reason="a benchmark")
    rng = np.random.default_rng(streams)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    for i in range(streams):
        prompt = rng.integers(1, executor.info.vocab_size, PROMPT).tolist()
        engine.submit(Submit(str(i), prompt, params))
    counts: Counter[str] = Counter()
    ids: list[int] = []
    start: tuple[float, int] | None = None
    end = start
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                counts[event.request_id] += len(event.token_ids)
                ids += event.token_ids if event.request_id == "0" else ()
        now = perf_counter(), counts.total()
        if start is None and len(counts) == streams and min(counts.values()) >= WARM:
            start = now
        if max(counts.values(), default=0) < tokens:
            end = now
    assert start is not None
    assert end is not None
    tps = (end[1] - start[1]) / (end[0] - start[0])
    memory = executor.memory()
    context = streams * (PROMPT + tokens / 2) * memory.kv_bytes_per_token
    return {
        "decode_tps": tps,
        "gbps": tps / streams * (memory.parameter_bytes + context) / 1e9,
        "off": list(executor.capabilities().off),
        "ids": hashlib.sha256(repr(ids[: int(CPU_TOKENS * SHORT)]).encode()).hexdigest()[:12],
    }


def table(runs: Sequence[dict[str, Any]], ceiling: float | None) -> str:
    lines = [f"{'route':16}{'streams':>8}{'tok/s':>10}{'GB/s':>9}{'of ceiling':>12}"]
    for run in runs:
        share = f"{run['gbps'] / ceiling:.0%}" if ceiling else "?"
        lines.append(
            f"{run['route']:16}{run['streams']:8}{run['decode_tps']:10.1f}{run['gbps']:9.1f}{share:>12}"
        )
    return "\n".join(lines)
