"""`python -m ferrum_mlx.bench.stock`: this engine beside stock mlx-lm on this machine, in one run.

Both get the same float32 weights of the default model, the same prompt and the same warm-up, each in a
process of its own, one after the other; the order changes from pair to pair, so that drift of a shared
machine hits both. mlx-lm runs as it is installed: that is what the ratio is against. Ends with one line
of JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ferrum_mlx.output import TextCodec

PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
Figures = dict[str, float]


@click.command(help="Time to first token and decode speed of ferrum-mlx ÷ stock mlx-lm, in pairs.")
@click.option("--pairs", default=3, type=click.IntRange(1), help="Pairs of runs.")
@click.option("--tokens", default=48, type=click.IntRange(2), help="Output tokens a run.")
@click.option(
    "--prompt-tokens", default=0, type=click.IntRange(0), help="A prompt of so many; 0: a question."
)
@click.option(
    "--side", type=click.Choice(["ferrum", "mlx-lm"]), hidden=True, help="One run, in this process."
)
def main(pairs: int, tokens: int, prompt_tokens: int, side: str | None) -> None:
    if side:
        click.echo(json.dumps(_SIDES[side](tokens, prompt_tokens)))
        return
    runs: list[tuple[Figures, Figures]] = []
    for pair in range(pairs):
        sides = ("ferrum", "mlx-lm") if pair % 2 == 0 else ("mlx-lm", "ferrum")  # no order effect
        figures = {name: _run(name, tokens, prompt_tokens) for name in sides}
        ours, theirs = figures["ferrum"], figures["mlx-lm"]
        if ours.pop("ids") != theirs.pop("ids"):
            raise click.ClickException("the two gave different token ids: nothing here can be compared")
        runs.append((ours, theirs))
        click.echo(f"pair {pair + 1}: {_line('ferrum-mlx', ours)}; {_line('mlx-lm', theirs)}")
    decode = [ours["decode_tps"] / theirs["decode_tps"] for ours, theirs in runs]
    ttft = [theirs["ttft_s"] / ours["ttft_s"] for ours, theirs in runs]
    click.echo(f"decode: {_ratio(decode)} times mlx-lm's speed; first token: {_ratio(ttft)} times sooner")
    click.echo(json.dumps({"decode_ratio": decode, "ttft_ratio": ttft}))


def figures_of(started: float, times: list[float]) -> Figures:
    """From the arrival times of a run's tokens; decode counts the tokens behind the first one."""
    return {"ttft_s": times[0] - started, "decode_tps": (len(times) - 1) / (times[-1] - times[0])}


def _run(side: str, tokens: int, prompt_tokens: int) -> Figures:
    command = [sys.executable, "-m", "ferrum_mlx.bench.stock", "--side", side, "--tokens", str(tokens)]
    command += ["--prompt-tokens", str(prompt_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"the run of {side} failed: {done.stderr.strip().splitlines()[-1]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _line(name: str, run: Figures) -> str:
    return f"{name} {run['decode_tps']:.1f} tok/s, first token after {run['ttft_s']:.2f} s"


def _ratio(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _prompt(tokenizer: TextCodec, prompt_tokens: int) -> list[int]:
    """A question as a chat; or the question again and again, as text."""
    if not prompt_tokens:
        return tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    return tokenizer.encode(f"{PROMPT} " * prompt_tokens)[:prompt_tokens]


def _ferrum(tokens: int, prompt_tokens: int) -> dict[str, object]:
    from ferrum_mlx import hub
    from ferrum_mlx.llm import LLM
    from ferrum_mlx.sampling import SamplingParams
    from ferrum_mlx.tokenizer import load_tokenizer

    prompt = _prompt(load_tokenizer(hub.resolve("", backend="mlx")), prompt_tokens)
    with LLM(backend="mlx", prefix_cache=False) as llm:
        for count in (2, tokens):  # the first is the warm-up
            params = SamplingParams(max_tokens=count, ignore_eos=True)
            ids: list[int] = []
            started, times = perf_counter(), []
            for delta in llm.generate([prompt], params, stream=True):
                times += [perf_counter()] * len(delta.token_ids)
                ids += delta.token_ids
    return {**figures_of(started, times), "ids": ids}


def _mlx_lm(tokens: int, prompt_tokens: int) -> dict[str, object]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from ferrum_mlx import hub
    from ferrum_mlx.backends.mlx.loader import load_model
    from ferrum_mlx.tokenizer import load_tokenizer

    resolved = hub.resolve("", backend="mlx")
    model, _ = load_model(resolved)
    mx.eval(model.parameters())
    prompt = mx.array(_prompt(load_tokenizer(resolved), prompt_tokens))
    for count in (2, tokens):  # the first is the warm-up
        started, times, ids = perf_counter(), [], []
        for token, _ in generate_step(prompt, model, max_tokens=count):
            ids.append(int(token))
            times.append(perf_counter())
    return {**figures_of(started, times), "ids": ids}


_SIDES = {"ferrum": _ferrum, "mlx-lm": _mlx_lm}

if __name__ == "__main__":
    main()
