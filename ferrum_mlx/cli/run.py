"""`ferrum-mlx run`: answer prompts and exit."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ferrum_mlx.cli.narrate import Thoughts, introduce, say, say_note, summarize
from ferrum_mlx.cli.options import (
    chosen_adapter,
    engine_config,
    engine_options,
    sampling_options,
    sampling_params,
    thinking_option,
    use_adapter_option,
)
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.metrics import Guesses, SpeculationStats
from ferrum_mlx.sanitize import sanitize

if TYPE_CHECKING:
    from ferrum_mlx.answers import RequestOutput
    from ferrum_mlx.client import EngineClient
    from ferrum_mlx.messages import Prompt, Ready, RequestEvent
    from ferrum_mlx.stream import RequestStream


@click.command(short_help="Answer prompts and exit.")
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@engine_options
@sampling_options
@thinking_option
@use_adapter_option
@click.option("-n", type=int, help="Answers to each prompt; needs a temperature.")
@click.option("--logprobs", type=int, metavar="K", help="Of each token and the K likeliest; --json only.")
@click.option("--system", default="", help="System message put before each prompt.")
@click.option("--raw", is_flag=True, help="Complete the bare text, without the chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object; several prompts, a list of them."
)
def run(
    prompts: tuple[str, ...],
    thinking: bool | None,
    use_adapter: str | None,
    system: str,
    raw: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer each PROMPT and exit; text goes to stdout as it comes, everything else to stderr.

    What a reasoning model thinks is no part of the answer; a terminal shows it dimmed.

    Without a PROMPT, or where one is "-", all of stdin is the prompt. Several prompts run together
    and are printed in their order.
    """
    if raw and system:
        raise UsageError("--system needs the chat template", next_step="leave --raw or --system away")
    if raw and thinking is not None:
        raise UsageError("--thinking needs the chat template", next_step="leave --raw or --thinking away")
    config, params = engine_config(options), sampling_params(options)
    adapter = chosen_adapter(config, use_adapter)
    if params.logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json", next_step="add --json, or leave --logprobs away")
    requests = [(_as_prompt(text, system, raw), params) for text in _texts(prompts)]

    from ferrum_mlx.client import EngineClient
    from ferrum_mlx.messages import ChatOptions

    chat = ChatOptions(thinking=thinking)
    with EngineClient.in_thread(config, on_loading=say, on_note=say_note) as client:
        ready = client.start()
        introduce(ready)
        if adapter:
            say(f"through the adapter {adapter}")
        if as_json:
            stream = client.submit_all(requests, chat=chat, adapters=[adapter] * len(requests))
            failures = _print_json(stream, client, ready, adapter)
        else:
            streams = [client.submit(prompt, params, chat=chat, adapter=adapter) for prompt, _ in requests]
            failures = _print_text(streams)
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
    thoughts = Thoughts()
    shown = sanitize if sys.stdout.isatty() else str  # a file gets the exact text
    for stream in streams:
        for event in _in_turn(stream):
            match event:
                case Delta(_, text, _, thinking):
                    thoughts.show(thinking)
                    if text:
                        thoughts.end()
                        click.echo(shown(text), nl=False)
                case Finished():
                    thoughts.end()
                    click.echo()
                    summarize(event)
                case Failed(_, error):
                    thoughts.end()
                    failures.append(error)
    return failures


def _in_turn(stream: RequestStream) -> Iterator[RequestEvent]:
    """A stream's events, one sample after the other, each as it comes when it is that one's turn."""
    from ferrum_mlx.messages import Delta

    held: dict[str, list[RequestEvent]] = {name: [] for name in stream.request_ids}
    turns = deque(stream.request_ids)
    for event in stream:
        held[event.request_id].append(event)
        while turns and (ready := held[turns[0]]):
            yield from ready
            ended = not isinstance(ready[-1], Delta)
            ready.clear()
            if not ended:
                break
            turns.popleft()


def _print_json(stream: RequestStream, client: EngineClient, ready: Ready, adapter: str) -> list[FerrumError]:
    from ferrum_mlx.answers import collect

    outputs = collect(stream)
    last = client.last_step
    speculation = last.speculation if last is not None else None
    objects = [_json_object(output, ready, speculation, adapter) for output in outputs]
    click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=False))
    samples = [sample for output in outputs for sample in output.outputs]
    return [sample.error for sample in samples if sample.error is not None]


def _json_object(
    output: RequestOutput, ready: Ready, speculation: SpeculationStats | None, adapter: str
) -> dict[str, Any]:
    return {
        **_json_sample(output),
        **({"outputs": [_json_sample(sample) for sample in output.outputs]} if output.others else {}),
        "usage": dataclasses.asdict(output.usage),
        "timings": dataclasses.asdict(output.timings),
        **({"speculation": _json_speculation(output, speculation)} if speculation else {}),
        "model": ready.info.model_id,
        **({"adapter": adapter} if adapter else {}),
        "backend": ready.backend,
        "backend_reason": ready.backend_reason,
        "device": ready.info.device,
        "weights": ready.info.quantization,
        "weights_quality": ready.info.quality,
        "kv_dtype": ready.info.kv_dtype or ready.info.dtype,
    }


def _json_speculation(output: RequestOutput, engine: SpeculationStats) -> dict[str, Any]:
    """Guesses of a prompt's samples; the time is that of all prompts, which are guessed for together."""
    stats = [sample.stats for sample in output.outputs if sample.stats is not None]
    guesses = Guesses(
        drafted=sum(each.drafted_tokens for each in stats),
        accepted=sum(each.accepted_tokens for each in stats),
        verifies=sum(each.verifies for each in stats),
    )
    return {
        "kind": engine.name,
        "drafted_tokens": guesses.drafted,
        "accepted_tokens": guesses.accepted,
        "acceptance_rate": guesses.acceptance_rate,
        "mean_acceptance_length": guesses.mean_acceptance_length,
        "draft_s": engine.draft_seconds,
        "why_off": engine.why,
    }


def _json_sample(output: RequestOutput) -> dict[str, Any]:
    logprobs = [dataclasses.asdict(token) for token in output.logprobs]
    return {
        "text": output.text,
        "thinking": output.thinking,
        "token_ids": list(output.token_ids),
        **({"logprobs": logprobs} if logprobs else {}),
        "finish_reason": output.finish_reason,
        "error": None if output.error is None else str(output.error),
    }
