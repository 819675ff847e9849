"""`python -m ferrum_mlx.bench.admission`: what a long prompt costs, to itself and to those that stream.

Two questions, each with the real model: how much sooner is the first token of a prompt whose beginning
was computed before, and how long do running streams pause while a long prompt comes in. For the second
the engine runs as it is, and as one that alternates: it prefills the whole prompt in one step. Prompts
are random token ids, fresh for each run, so nothing but what is meant to be comes from the cache. Ends
with one line of JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import click

from ferrum_mlx.bench.ours import drive
from ferrum_mlx.bench.workloads import Arrival, admission, random_ids
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine

WARM_TARGET = 1 / 20  # of the cold time to first token
GAP_TARGET = 5.0  # quiet gaps
_TAIL = 16  # tokens of a prompt behind the shared prefix
_ROOM = 1024  # tokens for what streams say meanwhile


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds, and tokens a second: running streams while a long prompt is admitted."""

    quiet_s: float  # the median gap between a stream's tokens before
    longest_s: float  # the longest from the prompt's arrival to its first token
    ttft_s: float
    prefill_tps: float

    @property
    def gaps(self) -> float:
        return self.longest_s / self.quiet_s


@click.command(help="TTFT with a warm prefix, and the pause of running streams while a prompt comes in.")
@click.option("-m", "--model", default="", help="Alias, hub repository, folder or .gguf file.")
@click.option("--prefix", default=2000, type=click.IntRange(64), help="Tokens of the long prompt.")
@click.option("--streams", default=2, type=click.IntRange(1), help="Streams that run meanwhile.")
@click.option("--runs", default=3, type=click.IntRange(1), help="Runs of each.")
@click.option(
    "--while-decoding",
    type=click.IntRange(1),
    help="EngineConfig.prefill_while_decoding to try in its place.",
)
def main(model: str, prefix: int, streams: int, runs: int, while_decoding: int | None) -> None:
    config = EngineConfig(model=model, max_model_len=prefix + _ROOM, prefill_while_decoding=while_decoding)
    whole = replace(
        config,
        max_num_batched_tokens=prefix + streams,
        max_prefill_chunk=prefix,
        prefill_while_decoding=prefix,
    )
    with _running(config) as engine:
        pairs = [warm_and_cold(engine, prefix, seed) for seed in range(runs)]
        report_warmth(pairs, prefix)
        mixed = [pause(engine, prefix, streams, seed) for seed in range(runs)]
    with _running(whole) as engine:
        alternating = [pause(engine, prefix, streams, seed) for seed in range(runs)]
    report_pauses(mixed, alternating)
    figures = {"mixed": [asdict(p) for p in mixed], "alternating": [asdict(p) for p in alternating]}
    click.echo(json.dumps({"warm_and_cold_ttft_s": pairs, **figures}))


@contextmanager
def _running(config: EngineConfig) -> Iterator[Engine]:
    from ferrum_mlx.build import build_engine

    engine = build_engine(config)
    try:
        first_token(engine, _prompt(engine, 64, "warm-up"))
        yield engine
    finally:
        engine.shutdown()


def report_warmth(pairs: Sequence[tuple[float, float]], prefix: int) -> None:
    warm, cold = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [w / c for w, c in pairs]
    click.echo(f"first token behind a prefix of {prefix} tokens: cold {cold:.3f} s, warm {warm:.3f} s")
    click.echo(f"warm ÷ cold: {_range(ratios, 4)}; {_verdict(ratios, WARM_TARGET)}")


def report_pauses(mixed: Sequence[Pause], alternating: Sequence[Pause]) -> None:
    for name, pauses in (("as it is", mixed), ("alternating", alternating)):
        quiet, longest = (statistics.median(values) for values in zip(*map(_times, pauses), strict=True))
        speed, ttft = (statistics.median(values) for values in zip(*map(_speeds, pauses), strict=True))
        click.echo(
            f"{name}: quiet gap {1000 * quiet:.0f} ms, longest while the prompt comes in "
            f"{1000 * longest:.0f} ms; the prompt's first token after {ttft:.2f} s, {speed:.0f} tok/s"
        )
    gaps = [p.gaps for p in mixed]
    click.echo(f"longest ÷ quiet: {_range(gaps, 1)}; {_verdict(gaps, GAP_TARGET)}")
    click.echo(f"longest ÷ quiet, alternating: {_range([p.gaps for p in alternating], 1)}")
    costs = [m.prefill_tps / a.prefill_tps for m, a in zip(mixed, alternating, strict=True)]
    click.echo(f"prefill speed, as it is ÷ alternating: {_range(costs, 2)}")


def _times(one: Pause) -> tuple[float, float]:
    return one.quiet_s, one.longest_s


def _speeds(one: Pause) -> tuple[float, float]:
    return one.prefill_tps, one.ttft_s


def _range(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _verdict(values: Sequence[float], target: float) -> str:
    return f"{'met' if statistics.median(values) <= target else 'MISSED'}: at most {target:g}"


def warm_and_cold(engine: Engine, prefix: int, seed: int) -> tuple[float, float]:
    """Times to first token behind one prefix: (when it was computed before, when it was not)."""
    shared = _prompt(engine, prefix, f"shared {seed}")
    cold, from_cache = first_token(engine, shared + _prompt(engine, _TAIL, "one tail"))
    if from_cache:
        raise click.ClickException(f"{from_cache} tokens of a prompt never seen came from the cache")
    warm, from_cache = first_token(engine, shared + _prompt(engine, _TAIL, "another tail"))
    if from_cache < prefix - 2 * _TAIL:
        raise click.ClickException(f"of a prefix of {prefix} tokens {from_cache} came from the cache")
    return warm, cold


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds from a prompt's arrival to its first token, and how many of its tokens were cached."""
    (stream,) = drive(engine, [Arrival("one", prompt, 1)]).streams
    return stream.times[0] - stream.arrived, stream.cached_tokens


def pause(engine: Engine, prefix: int, streams: int, seed: int) -> Pause:
    """Let streams run, then a long prompt come in; ends everything."""
    case = admission(streams, prefix, room=_ROOM - 64)
    arrivals = case.make(str(seed), engine.executor.info.vocab_size)
    figures = case.figures(drive(engine, arrivals, until_first_end=True))
    return Pause(*(figures[name] for name in ("quiet_gap_s", "longest_gap_s", "ttft_s", "prefill_tps")))


def _prompt(engine: Engine, length: int, seed: str) -> list[int]:
    return random_ids(seed, length, engine.executor.info.vocab_size)


if __name__ == "__main__":
    main()
