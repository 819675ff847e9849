"""`ferrum-mlx run`: answer prompts and exit."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ferrum_mlx.cli.narrate import introduce, say, summarize
from ferrum_mlx.cli.options import engine_config, engine_options, sampling_options, sampling_params
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.sanitize import sanitize

if TYPE_CHECKING:
    from ferrum_mlx.client import RequestStream
    from ferrum_mlx.llm import RequestOutput
    from ferrum_mlx.messages import Prompt, Ready


@click.command(short_help="Answer prompts and exit.")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@engine_options
@sampling_options
@click.option("--system", default="", help="System message put before each prompt.")
@click.option("--raw", is_flag=True, help="Complete the bare text, without the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; several prompts, a list of them."
)
def run(prompts: tuple[str, ...], system: str, raw: bool, as_json: bool, **options: Any) -> None:
    """Answer each PROMPT and exit; text goes to stdout as it comes, everything else to stderr.

    Without a PROMPT, or where one is "-", all of stdin is the prompt. Several prompts run together
    and are printed in their order.
    """
    if raw and system:
        raise UsageError("--system needs the chat template", next_step="leave --raw or --system away")
    config, params = engine_config(options), sampling_params(options)
    requests = [(_as_prompt(text, system, raw), params) for text in _texts(prompts)]

    from ferrum_mlx.client import EngineClient

    with EngineClient.in_thread(config, on_loading=say) as client:
        ready = client.start()
        introduce(ready)
        if as_json:
            failures = _print_json(client.submit_all(requests), ready)
        else:
            failures = _print_text([client.submit(prompt, params) for prompt, _ in requests])
    if failures:
        for failure in failures[1:]:
            say(f"ferrum-mlx: {failure}")
        raise failures[0]


def _texts(prompts: Sequence[str]) -> list[str]:
    if not prompts and sys.stdin.isatty():
        raise UsageError("there is no prompt", next_step="give one as an argument, or pipe one in")
    texts = [sys.stdin.read() if text == "-" else text for text in prompts or ("-",)]
    if any(not text.strip() for text in texts):
        raise UsageError("a prompt is empty", next_step="give some text")
    return texts


def _as_prompt(text: str, system: str, raw: bool) -> Prompt:
    if raw:
        return text
    instruction = [{"role": "system", "content": system}] if system else []
    return [*instruction, {"role": "user", "content": text}]


def _print_text(streams: Sequence[RequestStream]) -> list[FerrumError]:
    """Stream the answers to stdout, one after the other; returns the errors of those that failed."""
    from ferrum_mlx.messages import Delta, Failed, Finished

    failures = []
    shown = sanitize if sys.stdout.isatty() else str  # a file gets the exact text
    for stream in streams:
        for event in stream:
            match event:
                case Delta(_, text):
                    click.echo(shown(text), nl=False)
                case Finished():
                    click.echo()
                    summarize(event)
                case Failed(_, error):
                    failures.append(error)
    return failures


def _print_json(stream: RequestStream, ready: Ready) -> list[FerrumError]:
    from ferrum_mlx.llm import collect

    outputs = collect(stream)
    objects = [_json_object(output, ready) for output in outputs]
    click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False))
    return [output.error for output in outputs if output.error is not None]


def _json_object(output: RequestOutput, ready: Ready) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": dataclasses.asdict(output.usage),
        "timings": dataclasses.asdict(output.timings),
        "model": ready.info.model_id,
        "backend": ready.backend,
        "backend_reason": ready.backend_reason,
        "device": ready.info.device,
    }
