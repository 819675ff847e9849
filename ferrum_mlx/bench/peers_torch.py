"""transformers beside this engine: `generate` for one stream, `generate_batch` for several.

`generate_batch` sets its cache and its thread up at every call: that is in its time to first token and in
output_tps, as a caller meets it, and not in decode_tps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ferrum_mlx.bench.trace import Stream, Trace
from ferrum_mlx.bench.workloads import Arrival, Arriving, Case
from ferrum_mlx.errors import FerrumError

if TYPE_CHECKING:
    from ferrum_mlx.bench.peers import Setting


class _Watch(StoppingCriteria):
    """Asked after every token, it never stops anything."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        token = int(input_ids[0, -1])  # waits for a device
        self._stream.add(perf_counter(), [token])
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)


class Transformers:
    """`model` opens a transformers model with its own attention."""

    name = "transformers"

    def __init__(self, model: Callable[[], AbstractContextManager[Any]], *, same_weights: bool) -> None:
        self._model = model
        self.same_weights = same_weights

    def method(self, case: Case) -> str:
        return "generate" if case.streams == 1 else "generate_batch"

    def refusal(self, case: Case) -> str:
        if case.kind == "pp" and case.depth:
            return "it keeps no KV between requests, so it has no depth to start from"
        if case.streams > 1 and not case.at_once:
            return "its generate_batch takes all requests at the start"
        return ""

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        run, arriving = Trace(), Arriving(arrivals)
        with self._model() as model, torch.inference_mode():
            settings = deepcopy(model.generation_config)
            settings.eos_token_id = None  # go on past the end
            settings.do_sample = False
            while due := arriving.due(run, perf_counter()):
                if case.streams == 1:
                    for arrival, stream in due:
                        _generate(model, settings, arrival, stream)
                else:
                    _generate_batch(model, settings, due)
        return run

    def close(self) -> None:
        self._model = nullcontext


def _generate(model: Any, settings: Any, arrival: Arrival, stream: Stream) -> None:
    ids = torch.tensor([stream.prompt], device=model.device)
    original = model.generation_config
    model.generation_config = settings
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # without it, ids equal to the pad id would be hidden
            max_new_tokens=arrival.max_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([_Watch(stream)]),
        )
    finally:
        model.generation_config = original
    stream.ended = True


def _generate_batch(model: Any, settings: Any, due: Sequence[tuple[Arrival, Stream]]) -> None:
    with redirect_stdout(sys.stderr):  # it prints
        found = model.generate_batch(
            [stream.prompt for _, stream in due],
            generation_config=_without_end(settings),
            max_new_tokens=due[0][0].max_tokens,
            record_timestamps=True,
        )
    if len(found) != len(due):
        raise FerrumError(f"generate_batch answered {len(found)} of {len(due)} requests")
    for (_, stream), output in zip(due, found.values(), strict=True):
        if output.error:
            raise FerrumError(f"generate_batch: {' '.join(output.error.split())[:200]}")
        stream.times, stream.ids = list(output.timestamps), list(output.generated_tokens)
        stream.ended = True


def _without_end(settings: Any) -> Any:
    """generate_batch wants the absence of an end as a number."""
    changed = deepcopy(settings)
    changed.eos_token_id = -1
    return changed


def transformers_peer(setting: Setting) -> Transformers:
    from ferrum_mlx.backends.torch import device as devices
    from ferrum_mlx.backends.torch.executor import TorchExecutor
    from ferrum_mlx.backends.torch.loader import load_model

    executor = setting.subject.executor
    if isinstance(executor, TorchExecutor) and not executor.info.computes_in:
        return Transformers(executor.library_model, same_weights=True)
    packed = isinstance(executor, TorchExecutor)  # by us: transformers gets the file's weights as they are
    model, _ = load_model(setting.resolved(), devices.select(setting.config.device))
    wide = executor.info.rounding == devices.dtype_name(model.dtype) == "float32"
    return Transformers(lambda: nullcontext(model), same_weights=wide and not packed)
