"""`ferrum-mlx verify`: exactness checks on this machine and model."""

from __future__ import annotations

import json
from typing import Any

import click

from ferrum_mlx.cli.narrate import introduce, say
from ferrum_mlx.cli.options import engine_config, engine_options


@click.command(short_help="Check on this machine that batching, caching and the like change nothing.")
@click.argument("model_argument", required=False, default="", metavar="[MODEL]")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(model_argument: str, as_json: bool, **options: Any) -> None:
    """Check MODEL, or the default model, on this machine: a table, exit code 1 if there is a fault.

    The same prompts run alone, batched, in chunks, behind a cached prefix, after a preemption, and
    through the library's own code; ids and logits are compared. Two ids may differ where rounding
    decides between them, a near-tie; "exact" means equal bits, and takes --numerics exact. With --kv-bits
    all of it is checked at that precision, and the likelihood of a text against the model's own.
    """
    config = engine_config(options, model_argument)

    from ferrum_mlx.build import build_subject
    from ferrum_mlx.verify.report import verify as verified

    subject = build_subject(config, say)
    try:
        introduce(ready := subject.engine.ready())
        for why in ready.capabilities.off:
            say(f"fast path off: {why}")
        report = verified(subject, say)
    finally:
        subject.engine.shutdown()
    if as_json:
        click.echo(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        click.echo(report.table())
    say(report.summary)
    click.get_current_context().exit(1 if report.num_faults else 0)
