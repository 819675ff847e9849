"""`python -m ferrum_mlx.bench.torch_cpu`: torch on a CPU beside transformers' own generate, in one process.

Three systems over the same model: ours in float32, ours with packed weights, and transformers in float32.
One stream of a 128-token prompt is compared with `generate`, eight that enter one after the other with
`generate_batch`, whose requests are all there at the start. Each round runs all three, and the order turns,
so that drift of a shared machine hits all alike; ratios are taken within a round. Ends with one line of
JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ferrum_mlx.bench.ours import drive
from ferrum_mlx.bench.workloads import Case, decode, staggered
from ferrum_mlx.config import EngineConfig

if TYPE_CHECKING:
    from ferrum_mlx.backends.torch.executor import TorchExecutor
    from ferrum_mlx.engine import Engine

PROMPT, TOKENS, STREAMS = 128, 64, 8
THEIRS, WIDE, PACKED = "transformers float32", "ours float32", "ours packed"
# case and system of ours → at least so many times transformers' speed
TARGETS = {("one", WIDE): 1.1, ("one", PACKED): 2.5, ("eight", WIDE): 2.0, ("eight", PACKED): 2.0}
Run = Callable[[int], float]  # a seed → tokens a second
Round = dict[str, float]


@click.command(help="Decode speed of the torch backend on this CPU ÷ transformers' own generate, in rounds.")
@click.option("-m", "--model", default="", help="Alias, hub repository, folder or .gguf file.")
@click.option("--rounds", default=3, type=click.IntRange(1), help="Rounds of all systems.")
@click.option("--tokens", default=TOKENS, type=click.IntRange(8), help="Output tokens of a stream.")
def main(model: str, rounds: int, tokens: int) -> None:
    config = EngineConfig(model=model, backend="torch", device="cpu", max_model_len=PROMPT + tokens + 64)
    executors = {WIDE: _executor(config, packed=False), PACKED: _executor(config, packed=True)}
    click.echo(f"packed: {executors[PACKED].info.quantization}")
    cases = {
        "one": (decode(tokens, PROMPT, 1, config.max_prefill_chunk), "decode_tps"),
        "eight": (staggered(STREAMS, PROMPT, tokens), "output_tps"),
    }
    found: dict[str, list[Round]] = {}
    for name, (case, figure) in cases.items():
        systems = _systems(executors, config, case, figure)
        found[name] = measure(systems, rounds, partial(_say, name))
    for name, runs in found.items():
        report(name, runs)
    click.echo(json.dumps(found))


def _say(name: str, line: str) -> None:
    click.echo(f"{name}: {line}")


def measure(systems: dict[str, Run], rounds: int, say: Callable[[str], None]) -> list[Round]:
    """Every system once a round, in an order that turns, behind a warm-up of each."""
    for run in systems.values():
        run(-1)
    names, found = list(systems), []
    for i in range(rounds):
        order = names[i % len(names) :] + names[: i % len(names)]
        figures = {name: systems[name](i) for name in order}
        found.append(figures)
        say(f"round {i + 1}: " + ", ".join(f"{name} {figures[name]:.1f} tok/s" for name in names))
    return found


def report(name: str, runs: Sequence[Round]) -> None:
    for ours in (WIDE, PACKED):
        ratios = [figures[ours] / figures[THEIRS] for figures in runs]
        target = TARGETS[name, ours]
        verdict = "met" if statistics.median(ratios) >= target else "MISSED"
        click.echo(
            f"{name}: {ours} ÷ {THEIRS}: {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {verdict}: at least {target:g}"
        )


def _executor(config: EngineConfig, *, packed: bool) -> TorchExecutor:
    from ferrum_mlx import hub
    from ferrum_mlx.backends.torch.build import build_executor

    return build_executor(hub.resolve(config.model), config, lambda what: None, packed=packed)[0]


def _systems(
    executors: dict[str, TorchExecutor], config: EngineConfig, case: Case, figure: str
) -> dict[str, Run]:
    from ferrum_mlx.bench.peers_torch import Transformers

    vocab = executors[WIDE].info.vocab_size
    theirs = Transformers(executors[WIDE].library_model, same_weights=True)

    def ours(executor: TorchExecutor, seed: int) -> float:
        run = drive(_engine(executor, config), case.make(f"{case.name} {seed}", vocab))
        return case.figures(run)[figure]

    def library(seed: int) -> float:
        arrivals = [replace(a, after=0) for a in case.make(f"{case.name} {seed}", vocab)]
        return case.figures(theirs.run(case, arrivals))[figure]

    return {
        THEIRS: library,
        WIDE: lambda seed: ours(executors[WIDE], seed),
        PACKED: lambda seed: ours(executors[PACKED], seed),
    }


def _engine(executor: TorchExecutor, config: EngineConfig) -> Engine:
    from ferrum_mlx import hub
    from ferrum_mlx.engine import Engine
    from ferrum_mlx.tokenizer import load_tokenizer

    codec = load_tokenizer(hub.resolve(config.model))
    return Engine(executor, codec, config, backend="torch", backend_reason="bench")


if __name__ == "__main__":
    main()
