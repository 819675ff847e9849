"""`python -m ferrum_mlx.bench.targets`: the figures that README states, each beside what was aimed at.

Every line is one command, which this only calls and reads; `--list` prints them. Half an hour on a machine
that does nothing else; `--only NAME` runs one. A peer that is not installed leaves its rows empty.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ferrum_mlx.bench.random_model import write

Report = dict[str, Any]
Values = Sequence[float]
RANDOM = "RANDOM_MODEL"  # stands for the folder of a small random model
SPIN = (
    "GOMP_SPINCOUNT=20000"  # the best on a machine that does nothing else; our own choice is for others, too
)
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """`pick` finds the values of a measure in what a command has printed; none if they are not there."""

    measure: str
    least: float
    pick: Callable[[Report], Values]
    at_most: bool = False

    def line(self, report: Report) -> str:
        found = self.pick(report)
        aim = f"{'at most' if self.at_most else 'at least'} {self.least:g}"
        if not found:
            return f"| {self.measure} | {aim} | not measured | |"
        middle = statistics.median(found)
        met = middle <= self.least if self.at_most else middle >= self.least
        spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
        return f"| {self.measure} | {aim} | {middle:.2f}{spread} | {'met' if met else 'MISSED'} |"


def _ratio(test: str, figure: str = "decode_tps", streams: int = 1) -> Callable[[Report], Values]:
    """Ours ÷ the peer's, or the inverse of a time: above 1 ours is better."""

    def pick(report: Report) -> Values:
        wanted = {"test": test, "figure": figure, "streams": streams}
        lines = [line for line in report["ratios"] if wanted.items() <= line.items()]
        return lines[0]["values"] if lines else ()

    return pick


def _outside(report: Report) -> Values:
    """Percent of a decoding step that is not the forward."""
    figures = [line["figures"].get("outside_forward") for line in report["results"]]
    return [100 * value for found in figures if found for value in found["values"]][:5]


def _beyond(report: Report) -> Values:
    """MB of the process at its peak beyond weights and KV pool."""
    engine = report["engine"]
    counted = engine["parameter_bytes"] + engine["kv_pool_bytes"]
    return [(engine["peak_rss_bytes"] - counted) / MEGABYTE]


def _of(key: str) -> Callable[[Report], Values]:
    return lambda report: report[key]


def _rounds(case: str, ours: str) -> Callable[[Report], Values]:
    return lambda report: [figures[ours] / figures["transformers float32"] for figures in report[case]]


def _bench(*args: str) -> list[str]:
    return ["ferrum_mlx", "bench", *args, "--json"]


COMMANDS: dict[str, tuple[list[str], list[Row]]] = {
    "mlx-decode": (
        _bench("--backend", "mlx", "--tg", "128", "--depth", "128,2048", "--vs", "mlx-lm"),
        [
            Row("MLX, one stream, decode ÷ mlx-lm, context 128", 1.0, _ratio("tg128 @ d128")),
            Row("MLX, one stream, decode ÷ mlx-lm, context 2,048", 1.0, _ratio("tg128 @ d2048")),
            Row("MLX, one stream: engine outside the forward, %", 3.0, _outside, at_most=True),
            Row("MLX: peak RSS beyond weights and KV pool, MB", 400, _beyond, at_most=True),
        ],
    ),
    "mlx-prefill": (
        _bench("--backend", "mlx", "--pp", "512", "--vs", "mlx-lm"),
        [Row("MLX, prefill of 512 ÷ mlx-lm", 1.0, _ratio("pp512", "prefill_tps"))],
    ),
    "mlx-streams": (
        _bench("--backend", "mlx", "--tg", "64", "--depth", "128", "--batch", "8,16", "--vs", "mlx-lm"),
        [
            Row("MLX, 8 equal streams ÷ `BatchGenerator`", 1.0, _ratio("tg64 @ d128", streams=8)),
            Row("MLX, 16 equal streams ÷ `BatchGenerator`", 1.0, _ratio("tg64 @ d128", streams=16)),
        ],
    ),
    "mlx-workloads": (
        _bench("--backend", "mlx", "--workload", "ragged,admission", "--vs", "mlx-lm", "--reps", "3"),
        [
            Row("MLX, 16 ragged streams ÷ `BatchGenerator`", 1.3, _ratio("ragged", "output_tps", 16)),
            Row(
                "MLX, longest gap of 7 streams beside a long prompt, `BatchGenerator` ÷ ours",
                3.0,
                _ratio("admission", "longest_gap_s", 7),
            ),
        ],
    ),
    "mlx-long": (
        _bench(RANDOM, "--backend", "mlx", "--tg", "128", "--depth", "8192", "--vs", "mlx-lm"),
        [Row("MLX, decode ÷ mlx-lm, context 8,192, random model", 0.97, _ratio("tg128 @ d8192"))],
    ),
    "stock": (
        ["ferrum_mlx.bench.stock", "--prompt-tokens", "512", "--pairs", "3"],
        [
            Row("MLX on Linux ÷ stock mlx-lm, decode", 2.2, _of("decode_ratio")),
            Row("MLX on Linux ÷ stock mlx-lm, first token of a prompt of 512", 8.0, _of("ttft_ratio")),
        ],
    ),
    "torch": (
        ["ferrum_mlx.bench.torch_cpu", "--rounds", "5"],
        [
            Row("torch, one stream, float32 ÷ transformers", 1.1, _rounds("one", "ours float32")),
            Row("torch, one stream, packed ÷ transformers", 1.1, _rounds("one", "ours packed")),
            Row("torch, 8 streams, packed ÷ `generate_batch`", 3.0, _rounds("eight", "ours packed")),
        ],
    ),
    "llama.cpp": (
        [SPIN, *_bench("--backend", "torch", "--tg", "64", "--depth", "128,2048", "--vs", "llama.cpp")],
        [
            Row("torch packed, decode ÷ llama.cpp Q4_1, context 128", 0.5, _ratio("tg64 @ d128")),
            Row("torch packed, decode ÷ llama.cpp Q4_1, context 2,048", 0.7, _ratio("tg64 @ d2048")),
            Row("torch: peak RSS beyond weights and KV pool, MB", 400, _beyond, at_most=True),
        ],
    ),
}


@click.command(help="Measure what README states, on this machine, and print it as a table.")
@click.option("--only", type=click.Choice(list(COMMANDS)), multiple=True, help="These alone.")
@click.option("--list", "list_only", is_flag=True, help="Print the commands, run nothing.")
def main(only: tuple[str, ...], list_only: bool) -> None:
    chosen = {name: COMMANDS[name] for name in only or COMMANDS}
    if list_only:
        for name, (args, _) in chosen.items():
            click.echo(f"{name}: {_shown(args)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        click.echo("| measure | aim | measured: median, range | |\n|---|---|---|---|")
        for line in _lines(chosen, Path(folder) / "random"):
            click.echo(line)


def _lines(chosen: dict[str, tuple[list[str], list[Row]]], folder: Path) -> Iterator[str]:
    for name, (args, rows) in chosen.items():
        if RANDOM in args:
            write(folder)
        report = _run(name, [str(folder) if arg == RANDOM else arg for arg in args])
        yield from (row.line(report) for row in rows)


def _parted(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the environment, as in a shell; the module and its arguments."""
    count = sum("=" in arg for arg in args)
    return list(args[:count]), list(args[count:])


def _shown(args: Sequence[str]) -> str:
    settings, command = _parted(args)
    return " ".join([*settings, "python -m", *command])


def _run(name: str, args: list[str]) -> Report:
    """What a command's last line of output holds; what it narrates goes where ours does."""
    click.echo(f"{name}: {_shown(args)}", err=True)
    settings, command = _parted(args)
    env = os.environ | dict(setting.split("=") for setting in settings)
    done = subprocess.run([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        raise click.ClickException(f"{name} failed with exit code {done.returncode}; its own words are above")
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


if __name__ == "__main__":
    main()
