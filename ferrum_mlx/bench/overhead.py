"""`python -m ferrum_mlx.bench.overhead`: what a step costs before any model computes.

The engine, scheduler and block bookkeeping run as they are, over an executor whose forward does
nothing. What is measured is a whole `Engine.step` in which every request decodes one token. Prompts
differ in their first tokens, so that none shares blocks, and in length, so that their blocks do not
all fill up in the same step. Ends with one line of JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import click

from ferrum_mlx.batch import ItemResult, UnifiedBatch
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.messages import Stepped, Submit
from ferrum_mlx.metrics import StepStats
from ferrum_mlx.sampling import SamplingParams

if TYPE_CHECKING:
    from ferrum_mlx.backends.fake import FakeExecutor

TARGETS_MS = {1: 0.15, 64: 2.0, 256: 8.0}  # by running requests
CONTEXTS = (100, 3000)
_WARM_UP = 20  # steps
_TOKEN = ord("a")


@dataclass(frozen=True, slots=True)
class _Done:
    results: list[ItemResult]

    def result(self) -> list[ItemResult]:
        return self.results


@click.command(help="Python cost of a decode step, by running requests and length of their contexts.")
@click.option("--steps", default=300, type=click.IntRange(2), help="Steps measured, each.")
def main(steps: int) -> None:
    click.echo("running  context  median ms  p99 ms  (schedule + forward + commit)  target")
    runs = []
    for running, target in TARGETS_MS.items():
        for context in CONTEXTS:
            run = {"running": running, "context": context, **figures_of(measure(running, context, steps))}
            click.echo(line_of(run, target))
            runs.append(run | {"target_ms": target})
    growth = {str(running): growth_of(runs, running) for running in TARGETS_MS}
    grown = ", ".join(f"{ratio:.2f} at {running}" for running, ratio in growth.items())
    click.echo(f"median at context {CONTEXTS[1]} ÷ {CONTEXTS[0]}: {grown}; target: 1")
    click.echo(json.dumps({"runs": runs, "growth": growth}))


def figures_of(steps: Sequence[tuple[float, StepStats]]) -> dict[str, float]:
    """Milliseconds, out of each step's duration and what it said of itself."""
    whole = sorted(seconds for seconds, _ in steps)
    parts = {
        name: statistics.median(getattr(stats, f"{name}_s") for _, stats in steps)
        for name in ("schedule", "forward", "commit")
    }
    figures = {"median": statistics.median(whole), "p99": whole[-(-len(whole) * 99 // 100) - 1], **parts}
    return {f"{name}_ms": 1000 * seconds for name, seconds in figures.items()}


def line_of(run: dict[str, float], target: float) -> str:
    parts = " + ".join(f"{run[f'{name}_ms']:.3f}" for name in ("schedule", "forward", "commit"))
    return (
        f"{run['running']:7}  {run['context']:7}  {run['median_ms']:9.3f}  {run['p99_ms']:6.2f}  "
        f"({parts})  {'met' if run['median_ms'] <= target else 'MISSED'}: at most {target:g}"
    )


def growth_of(runs: Sequence[dict[str, float]], running: int) -> float:
    short, long = (run["median_ms"] for run in runs if run["running"] == running)
    return long / short


def measure(running: int, context: int, steps: int) -> list[tuple[float, StepStats]]:
    """The durations in seconds, and the engine's own words, of steps in which `running` requests decode.

    Raises:
        click.ClickException: a step did anything else.
    """
    engine = _engine(running, context + steps)
    params = SamplingParams(max_tokens=steps + _WARM_UP + 2, ignore_eos=True)
    for i in range(running):
        prompt = [i % 256, i // 256] + [_TOKEN] * (context - 2 + i % 16)
        engine.submit(Submit(str(i), prompt, params))
    for _ in range(_WARM_UP):  # the first is the prefill of them all
        engine.step()
    measured = []
    for _ in range(steps):
        started = perf_counter()
        events = engine.step()
        seconds = perf_counter() - started
        stats = next((event.stats for event in events if isinstance(event, Stepped)), None)
        if stats is None or (stats.decode_tokens, stats.prefill_tokens) != (running, 0):
            raise click.ClickException(f"a step was no decode of {running} requests: {stats}")
        measured.append((seconds, stats))
    engine.shutdown()
    return measured


def _engine(running: int, longest: int) -> Engine:
    from ferrum_mlx.backends.fake import BYTES_PER_TOKEN, FakeCodec

    most = longest + _WARM_UP + 64  # of a request, in tokens: blocks are whole, prompts differ by 15
    config = EngineConfig(
        backend="fake",
        max_model_len=most,
        kv_memory=running * most * BYTES_PER_TOKEN,
        max_num_seqs=running,
        max_num_batched_tokens=max(8, running * most),
        max_prefill_chunk=most,
    )
    return Engine(_executor(config), FakeCodec(), config, backend="fake", backend_reason="a benchmark")


def _executor(config: EngineConfig) -> FakeExecutor:
    from ferrum_mlx.backends.fake import FakeExecutor

    class Free(FakeExecutor):
        """Its forward costs an object an item, whatever is in the batch."""

        def _launch(self, batch: UnifiedBatch) -> _Done:
            return _Done([ItemResult(item.cache_id, (_TOKEN,) * item.num_sampled) for item in batch.items])

    executor = Free(config)
    executor.prepare_startup()
    return executor


if __name__ == "__main__":
    main()
