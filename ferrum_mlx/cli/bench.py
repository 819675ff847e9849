"""`ferrum-mlx bench`: how fast this engine is on this machine, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ferrum_mlx.cli.narrate import introduce, say
from ferrum_mlx.cli.options import chosen_adapter, engine_config, engine_options, use_adapter_option
from ferrum_mlx.errors import UsageError

if TYPE_CHECKING:
    from ferrum_mlx.bench.progress import Tell
    from ferrum_mlx.bench.report import Report
    from ferrum_mlx.bench.workloads import Case
    from ferrum_mlx.config import EngineConfig

_FORMATS = ("md", "json", "csv")
_BESIDE_KERNELS = {"kernels", "reps", "form", "as_json", "device"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A benchmark as the command line has it; see the options. It can be pickled, as cases cannot."""

    config: EngineConfig
    pp: tuple[int, ...] | None
    tg: tuple[int, ...] | None
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    workloads: tuple[str, ...]
    vs: tuple[str, ...]
    reps: int
    seed: int
    form: str
    plot: str
    adapter: str


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


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


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
@click.option(
    "--kernels", is_flag=True, help="Attention alone in place of a model: the Metal kernel beside gathering."
)
@click.option("--reps", type=click.IntRange(1), default=5, show_default=True, help="Repetitions.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same prompts.")
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="md", show_default=True, help="Of the report."
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.option("--plot", metavar="FILE", default="", help="Draw a chart too: a .png or .svg file.")
@click.option("--watch", is_flag=True, help="Show it on the screen while it runs; then the report.")
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
    kernels: bool,
    reps: int,
    seed: int,
    form: str,
    as_json: bool,
    plot: str,
    watch: bool,
    **options: Any,
) -> None:
    """Measure MODEL, or the default model, on this machine; the report goes to stdout.

    The tests are llama-bench's: pp512 prefills 512 tokens, tg128 decodes 128, "@ d2048" behind so many
    more. Workloads show an engine: requests that come and go. With --workload the tests are left out,
    unless --pp or --tg is given too. With --speculative, edit, code and chat also run without it, in
    turns. Peers run in the same process on the same weights, in turns, and without adapters. Greedy ids
    are compared with the model library's own first: what computes something else fails, exit code 1.
    --watch shows all that on the screen, drawn between runs only; q or Ctrl+C stops, with the report of
    what was measured.
    """
    context = click.get_current_context()
    form = "json" if as_json else form
    if kernels:
        _refuse_beside_kernels(context)
        _run_kernels(options["device"] or "", reps, form)
        return
    config = engine_config(options, model_argument)
    asked = Asked(
        *(config, pp, tg, depth, batch, _names(workload), _names(vs), reps, seed),
        *(form, plot, chosen_adapter(config, use_adapter)),
    )
    _check(asked)
    if watch:
        from ferrum_mlx.cli.watch import watch as show

        context.exit(show(asked))
    context.exit(1 if run(asked) else 0)


def _refuse_beside_kernels(context: click.Context) -> None:
    """Raises UsageError for what was given and has no meaning where no model runs."""
    given = [
        _name(param, context.params[param.name])
        for param in context.command.params
        if param.name not in _BESIDE_KERNELS
        and context.get_parameter_source(param.name) not in (None, ParameterSource.DEFAULT)
    ]
    if given:
        raise UsageError(
            f"--kernels beside {', '.join(given)}",
            "allowed: --reps, --format, --json and --device, since no model runs",
        )


def _name(param: click.Parameter, value: object) -> str:
    """As it was given, but for short ones."""
    if isinstance(param, click.Argument):
        return "MODEL"
    return max(param.secondary_opts if value is False else param.opts, key=len)


def _check(asked: Asked) -> None:
    """Raises UsageError for what cannot be, before anything is loaded."""
    from ferrum_mlx.bench import plot
    from ferrum_mlx.bench.peers import check_names

    _cases(asked)
    check_names(asked.vs)
    if asked.plot:
        plot.check(asked.plot)


def _cases(asked: Asked) -> list[Case]:
    from ferrum_mlx.bench.workloads import WORKLOADS, decode, prefill

    config, pp, tg, workloads = asked.config, asked.pp, asked.tg, asked.workloads
    if pp is None and tg is None and not workloads:
        pp, tg = (512,), (128,)
    if workloads == ("all",):
        workloads = tuple(WORKLOADS)
    for name in workloads:
        if name not in WORKLOADS:
            raise UsageError(f"--workload {name!r}", f"allowed: {', '.join(WORKLOADS)}, or all")
    if pp and any(asked.depths) and not config.prefix_cache:
        raise UsageError(
            "--pp with a --depth needs the prefix cache, which keeps the depth",
            next_step="leave --no-prefix-cache away, or give --tg alone",
        )
    chunk = min(config.max_prefill_chunk, config.max_num_batched_tokens)
    shapes = [(depth, batch) for depth in asked.depths for batch in asked.batches]
    cases = [prefill(tokens, depth, batch) for tokens in pp or () for depth, batch in shapes]
    cases += [decode(tokens, depth, batch, chunk) for tokens in tg or () for depth, batch in shapes]
    return cases + [WORKLOADS[name]() for name in workloads]


def run(
    asked: Asked,
    say: Callable[[str], None] = say,
    tell: Tell | None = None,
    show: Callable[[str], object] = click.echo,
) -> bool:
    """Whether a check failed.

    Args:
        tell: is given what bench/progress.py names.
        show: is given the report.

    Raises:
        KeyboardInterrupt: after the report of what was measured until then.
    """
    from ferrum_mlx.bench.plot import draw
    from ferrum_mlx.bench.progress import untold

    cases = _cases(asked)
    report = _measured(asked, cases, say, tell or untold)
    if report.complete or report.lines:
        show(_text(report, asked.form))
        if asked.plot:
            draw(report, cases, asked.plot)
            say(f"the chart is in {asked.plot}")
    for fault in report.results.faults:
        say(f"ferrum-mlx: {fault}; the figures are not those of this model")
    if not report.complete:
        raise KeyboardInterrupt
    return bool(report.results.faults)


def _measured(asked: Asked, cases: list[Case], say: Callable[[str], None], tell: Tell) -> Report:
    from ferrum_mlx.bench.session import benchmark, fitting
    from ferrum_mlx.build import build_subject

    config = fitting(asked.config, cases)
    subject = build_subject(config, say)
    try:
        introduce(subject.engine.ready())
        return benchmark(
            subject,
            config,
            cases,
            vs=asked.vs,
            reps=asked.reps,
            seed=asked.seed,
            say=say,
            tell=tell,
            adapter=asked.adapter,
        )
    finally:
        subject.engine.shutdown()


def _run_kernels(device: str, reps: int, form: str) -> None:
    """Raises KeyboardInterrupt after the report of what was measured until then."""
    from ferrum_mlx.bench.kernels import on_this_mac

    report = on_this_mac(device, reps, say)
    click.echo(_text(report, form))
    if not report.complete:
        raise KeyboardInterrupt


def _text(report: Report, form: str) -> str:
    return {"md": report.as_markdown, "json": report.as_json, "csv": report.as_csv}[form]()
