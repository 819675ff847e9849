"""`ferrum-mlx bench`: how fast this engine is on this machine, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ferrum_mlx.cli.narrate import introduce, say
from ferrum_mlx.cli.options import chosen_adapter, engine_config, engine_options, use_adapter_option
from ferrum_mlx.errors import UsageError

if TYPE_CHECKING:
    from ferrum_mlx.bench.workloads import Case
    from ferrum_mlx.config import EngineConfig

_FORMATS = ("md", "json", "csv")


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers with commas between, none below `least`, each once."""

    def read(text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() and int(part) >= least for part in parts):
            raise click.BadParameter(
                f"{text!r}; allowed: whole numbers of at least {least}, with commas between"
            )
        return tuple(dict.fromkeys(map(int, parts)))

    return read


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


@click.command(short_help="Measure speed, alone and beside other engines.")
@click.argument("model_argument", required=False, default="", metavar="[MODEL]")
@click.option("--pp", type=numbers(1), metavar="N,N", help="Tokens of a prompt; default: 512.")
@click.option("--tg", type=numbers(2), metavar="N,N", help="Tokens of an answer; default: 128.")
@click.option("--depth", type=numbers(0), metavar="N,N", default="0", help="Tokens before; default: 0.")
@click.option("--batch", type=numbers(1), metavar="N,N", default="1", help="Streams at once; default: 1.")
@click.option(
    "--workload",
    default="",
    metavar="NAME,NAME",
    help="staggered, ragged, shared-prefix, multi-turn, admission, edit, code, chat; or all.",
)
@click.option(
    "--vs", default="", metavar="NAME,NAME", help="Peers: mlx-lm, transformers, llama.cpp, a server's URL."
)
@click.option("--reps", type=click.IntRange(1), default=5, show_default=True, help="Repetitions.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same prompts.")
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="md", show_default=True, help="Of the report."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--plot", metavar="FILE", default="", help="Draw a chart too: a .png or .svg file.")
@engine_options
@use_adapter_option
def bench(
    model_argument: str,
    use_adapter: str | None,
    pp: tuple[int, ...] | None,
    tg: tuple[int, ...] | None,
    depth: tuple[int, ...],
    batch: tuple[int, ...],
    workload: str,
    vs: str,
    reps: int,
    seed: int,
    form: str,
    as_json: bool,
    plot: str,
    **options: Any,
) -> None:
    """Measure MODEL, or the default model, on this machine; the report goes to stdout.

    The tests are llama-bench's: pp512 prefills 512 tokens, tg128 decodes 128, "@ d2048" behind so many
    more. Workloads show an engine: requests that come and go. With --workload the tests are left out,
    unless --pp or --tg is given too. With --speculative, edit, code and chat also run without it, in
    turns. Peers run in the same process on the same weights, in turns, and without adapters. Greedy ids
    are compared with the model library's own first: what computes something else fails, exit code 1.
    """
    config = engine_config(options, model_argument)
    adapter = chosen_adapter(config, use_adapter)

    from ferrum_mlx.bench import plot as plots
    from ferrum_mlx.bench.peers import check_names

    cases = _cases(config, pp, tg, depth, batch, _names(workload))
    check_names(_names(vs))
    if plot:
        plots.check(plot)
    failed = _run(config, cases, _names(vs), reps, seed, "json" if as_json else form, plot, adapter)
    click.get_current_context().exit(1 if failed else 0)


def _cases(
    config: EngineConfig,
    pp: tuple[int, ...] | None,
    tg: tuple[int, ...] | None,
    depths: Sequence[int],
    batches: Sequence[int],
    workloads: Sequence[str],
) -> list[Case]:
    from ferrum_mlx.bench.workloads import WORKLOADS, decode, prefill

    if pp is None and tg is None and not workloads:
        pp, tg = (512,), (128,)
    if workloads == ["all"]:
        workloads = list(WORKLOADS)
    for name in workloads:
        if name not in WORKLOADS:
            raise UsageError(f"--workload {name!r}", f"allowed: {', '.join(WORKLOADS)}, or all")
    if pp and any(depths) and not config.prefix_cache:
        raise UsageError(
            "--pp with a --depth needs the prefix cache, which keeps the depth",
            next_step="leave --no-prefix-cache away, or give --tg alone",
        )
    chunk = min(config.max_prefill_chunk, config.max_num_batched_tokens)
    shapes = [(depth, batch) for depth in depths for batch in batches]
    cases = [prefill(tokens, depth, batch) for tokens in pp or () for depth, batch in shapes]
    cases += [decode(tokens, depth, batch, chunk) for tokens in tg or () for depth, batch in shapes]
    return cases + [WORKLOADS[name]() for name in workloads]


def _run(
    config: EngineConfig,
    cases: Sequence[Case],
    vs: Sequence[str],
    reps: int,
    seed: int,
    form: str,
    plot: str,
    adapter: str,
) -> bool:
    """Whether a check failed.

    Raises:
        KeyboardInterrupt: after the report of what was measured until then.
    """
    from ferrum_mlx.bench.plot import draw
    from ferrum_mlx.bench.session import benchmark, fitting
    from ferrum_mlx.build import build_subject

    config = fitting(config, cases)
    subject = build_subject(config, say)
    try:
        introduce(subject.engine.ready())
        report = benchmark(subject, config, cases, vs=vs, reps=reps, seed=seed, say=say, adapter=adapter)
    finally:
        subject.engine.shutdown()
    if report.complete or report.lines:
        texts = {"md": report.as_markdown, "json": report.as_json, "csv": report.as_csv}
        click.echo(texts[form]())
        if plot:
            draw(report, cases, plot)
            say(f"the chart is in {plot}")
    for fault in report.results.faults:
        say(f"ferrum-mlx: {fault}; the figures are not those of this model")
    if not report.complete:
        raise KeyboardInterrupt
    return bool(report.results.faults)
