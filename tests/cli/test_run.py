from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_mlx.cli.options import byte_size

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
FAKE = ("run", "--backend", "fake", "--max-tokens", "12")
KEYS = [
    *("text", "thinking", "token_ids", "finish_reason", "error", "usage", "timings", "model"),
    *("backend", "backend_reason", "device", "weights", "weights_quality", "kv_dtype"),
]


def ask(ferrum: Run, *args: str, stdin: str = "") -> Any:
    done = ferrum(*FAKE, "--json", *args, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_text_on_stdout_narration_on_stderr(ferrum: Run) -> None:
    done = ferrum(*FAKE, "hello")
    assert done.returncode == 0
    assert done.stdout == ask(ferrum, "hello")["text"] + "\n"
    assert "fake on fake" in done.stderr
    assert "asked for by --backend" in done.stderr
    assert "tok/s" in done.stderr


def test_json_has_exactly_these_keys(ferrum: Run) -> None:
    answer = ask(ferrum, "hello")
    assert list(answer) == KEYS
    assert list(answer["usage"]) == ["prompt_tokens", "completion_tokens", "cached_tokens"]
    assert list(answer["timings"]) == ["ttft_s", "prefill_tps", "decode_tps"]
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 12
    assert bytes(answer["token_ids"]).decode() == answer["text"]
    assert (answer["model"], answer["backend"], answer["device"]) == ("fake", "fake", "none")


def test_several_prompts_are_a_list_in_their_order_equal_to_each_alone(ferrum: Run) -> None:
    both = ask(ferrum, "one", "two")
    assert [answer["token_ids"] for answer in both] == [
        ask(ferrum, "one")["token_ids"],
        ask(ferrum, "two")["token_ids"],
    ]
    printed = ferrum(*FAKE, "one", "two").stdout
    assert printed == "".join(answer["text"] + "\n" for answer in both)


def test_prompt_from_stdin(ferrum: Run) -> None:
    assert ask(ferrum, stdin="hello")["text"] == ask(ferrum, "hello")["text"]
    assert ask(ferrum, "-", stdin="hello")["text"] == ask(ferrum, "hello")["text"]
    assert ask(ferrum, "hello", stdin="not read")["text"] == ask(ferrum, "hello")["text"]


def test_template_raw_and_system(ferrum: Run) -> None:
    chat = ask(ferrum, "hello")
    raw = ask(ferrum, "--raw", "hello")
    system = ask(ferrum, "--system", "be", "hello")
    assert raw["usage"]["prompt_tokens"] == len("hello")
    assert chat["usage"]["prompt_tokens"] == 1 + len("hello")
    assert system["usage"]["prompt_tokens"] == 1 + len("be") + 1 + len("hello")
    assert len({raw["text"], chat["text"], system["text"]}) == 3


def test_sampling_options_reach_the_engine(ferrum: Run) -> None:
    seeded = [ask(ferrum, "--temperature", "1", "--seed", seed, "hello")["text"] for seed in "112"]
    assert seeded[0] == seeded[1] != seeded[2]
    greedy = ask(ferrum, "hello")["text"]
    stop = greedy[5:7]
    stopped = ask(ferrum, "--stop", "no such", "--stop", stop, "hello")
    assert stopped["text"] == greedy[: greedy.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_penalties_and_least_length_reach_the_engine(ferrum: Run) -> None:
    plain = ask(ferrum, "hello")["text"]
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert ask(ferrum, option, "1.5", "hello")["text"] != plain
    stop = ["--stop", plain[2:4]]
    assert ask(ferrum, *stop, "hello")["text"] == plain[:2]
    assert ask(ferrum, *stop, "--min-tokens", "8", "hello")["text"] == plain


def test_several_answers_are_printed_in_turn_and_listed(ferrum: Run) -> None:
    args = ("-n", "3", "--temperature", "1", "--seed", "0", "one", "two")
    both = ask(ferrum, *args)
    samples = [[sample["text"] for sample in answer["outputs"]] for answer in both]
    assert [len(set(texts)) for texts in samples] == [3, 3]
    assert [answer["text"] for answer in both] == [texts[0] for texts in samples]
    assert both[0]["usage"]["completion_tokens"] == 36
    printed = ferrum(*FAKE, *args)
    assert printed.stdout == "".join(text + "\n" for texts in samples for text in texts)
    assert printed.stderr.count("tok/s, first") == 6


def test_logprobs_in_json(ferrum: Run) -> None:
    answer = ask(ferrum, "--logprobs", "2", "hello")
    assert [token["token_id"] for token in answer["logprobs"]] == answer["token_ids"]
    assert list(answer["logprobs"][0]) == ["token_id", "logprob", "rank", "top"]
    assert [len(token["top"]) for token in answer["logprobs"]] == [2] * 12


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--max-tokens", "0", "hi"], ["max_tokens", "0", "at least 1"]),
        (["--temperature", "-1", "hi"], ["temperature", "-1", "0 (greedy)"]),
        (["--top-p", "0", "hi"], ["top_p", "0"]),
        (["--top-k", "-2", "hi"], ["top_k", "-2"]),
        (["--min-p", "2", "hi"], ["min_p", "2", "to 1"]),
        (["--xtc-probability", "2", "hi"], ["xtc_probability", "2"]),
        (["--xtc-threshold", "0.6", "hi"], ["xtc_threshold", "0.6", "0.5"]),
        (["--repetition-penalty", "0", "hi"], ["repetition_penalty", "0", "1 is off"]),
        (["--presence-penalty", "3", "hi"], ["presence_penalty", "3"]),
        (["--frequency-penalty", "nan", "hi"], ["frequency_penalty", "nan"]),
        (["--min-tokens", "513", "hi"], ["min_tokens", "513", "512"]),
        (["-n", "2", "hi"], ["n is 2", "temperature"]),
        (["--logprobs", "1", "hi"], ["--logprobs", "--json"]),
        (["--json", "--logprobs", "21", "hi"], ["logprobs", "21", "20"]),
        (["--seed", "-1", "hi"], ["seed", "-1"]),
        (["--stop", "", "hi"], ["stop"]),
        (["--kv-memory", "0GB", "hi"], ["kv_memory", "0"]),
        (["--max-model-len", "0", "hi"], ["max_model_len", "0"]),
        (["--raw", "--system", "x", "hi"], ["--raw", "--system"]),
        ([""], ["prompt", "empty"]),
        (["x" * 5000], ["5001 tokens", "--max-model-len"]),
    ],
)
def test_bad_input_is_one_line_and_2(refused: Refused, args: list[str], parts: list[str]) -> None:
    line = refused("run", "--backend", "fake", *args, code=2)
    assert all(part in line for part in parts)


def test_empty_stdin_is_no_prompt(refused: Refused) -> None:
    assert "empty" in refused("run", "--backend", "fake", code=2)


def test_bad_prompt_does_not_lose_its_neighbour(ferrum: Run) -> None:
    done = ferrum(*FAKE, "--json", "x" * 5000, "fine")
    assert done.returncode == 2
    bad, good = json.loads(done.stdout)
    assert (bad["finish_reason"], bad["text"]) == ("error", "")
    assert "tokens" in bad["error"]
    assert good["text"] == ask(ferrum, "fine")["text"]
    assert "5001 tokens" in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("5b", 5),
        ("512MB", 512 * 10**6),
        ("1.5 gb", 15 * 10**8),
        ("2GiB", 2 * 2**30),
        ("3k", 3000),
        ("1TB", 10**12),
    ],
)
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@given(st.text(max_size=8))
def test_byte_size_takes_or_refuses(text: str) -> None:
    with contextlib.suppress(click.BadParameter):
        assert byte_size(text) >= 0
