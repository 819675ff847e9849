"""What is asked of every system: prompts, when they arrive, and how long the answers are.

A case says who arrives after how many output tokens of the run, not after how many seconds: so a fast
system and a slow one get the same load. Prompts are random token ids, fresh for each repetition, so that
nothing but what is meant to be comes from a cache; `edit`, `code` and `chat` are texts. An answer's length
is fixed, and ends of sequence are ignored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ferrum_mlx.bench.texts import TEXTS
from ferrum_mlx.bench.trace import (
    Figures,
    Stream,
    Trace,
    admission_figures,
    decode_figures,
    load_figures,
    prefill_figures,
)

PAIRS = 10  # of a free chat with and without speculation, at least: acceptance differs by prompt
QUIET = 32  # gaps of every running stream before the long prompt comes in
_FIRST_ID = 64  # special tokens mostly lie below
_TEMPLATE = 768  # tokens that a templated text may have

# kind → (what is made of a run, the figure that a chart shows)
KINDS: dict[str, tuple[Callable[[Trace], Figures], str]] = {
    "pp": (prefill_figures, "prefill_tps"),
    "tg": (decode_figures, "decode_tps"),
    "load": (load_figures, "output_tps"),
    "admission": (admission_figures, "longest_gap_s"),
    "text": (decode_figures, "decode_tps"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    Attributes:
        after: it arrives when so many tokens have come, of all streams.
        follows: a stream that has ended by then; its prompt and answer go before this prompt.
        measured, intrudes: see Stream.
    """

    name: str
    prompt: Sequence[int]
    max_tokens: int
    after: int = 0
    follows: str = ""
    measured: bool = True
    intrudes: bool = False


Make = Callable[[str, int], list[Arrival]]  # a seed, the size of the vocabulary → the requests


def _nothing(seed: str, vocab: int) -> list[Arrival]:
    return []


@dataclass(frozen=True, slots=True)
class Case:
    """A test of the table.

    Attributes:
        name: in llama-bench's words: pp512, tg128, "@ d2048" behind a depth; or the workload's.
        kind: one of KINDS.
        streams: how many run at once.
        longest: tokens of its longest sequence.
        make: its requests, but for those of `texts`, which are templated, one a repetition, in turn.
        tokens: of an answer, at most, where that is said of all.
        depth: tokens in the KV before what is measured.
        at_once: every request is there at the start.
    """

    name: str
    kind: str
    streams: int
    longest: int
    make: Make = _nothing
    tokens: int = 0
    depth: int = 0
    texts: tuple[str, ...] = ()
    at_once: bool = True

    @property
    def main(self) -> str:
        return KINDS[self.kind][1]

    @property
    def until_first_end(self) -> bool:
        """The run is over when one stream has ended."""
        return self.kind in ("tg", "admission")

    def figures(self, run: Trace) -> Figures:
        return KINDS[self.kind][0](run)


def prefill(tokens: int, depth: int, batch: int) -> Case:
    """pp: `batch` prompts at once; a depth is in the prefix cache by then."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        before = [
            Arrival(f"depth {i}", random_ids(f"{seed} depth {i}", depth, vocab), 1, measured=False)
            for i in range(batch if depth else 0)
        ]
        prompts = [Arrival(f"prompt {i}", random_ids(f"{seed} {i}", tokens, vocab), 1) for i in range(batch)]
        if depth:
            prompts = [replace(p, after=batch, follows=f"depth {i}") for i, p in enumerate(prompts)]
        return before + prompts

    name, longest = _named("pp", tokens, depth), depth + tokens + 2
    return Case(name, "pp", batch, longest, make, depth=depth, at_once=not depth)


def decode(tokens: int, depth: int, batch: int, chunk: int) -> Case:
    """tg: `batch` streams behind prompts of `depth` tokens.

    `chunk` is how much prompt a step takes: streams may be early by as many tokens as there are such
    steps, and say that many more, so that all are measured together for `tokens` tokens.
    """
    prompt = max(1, depth)
    early = -(-batch * prompt // chunk) if batch > 1 else 0

    def make(seed: str, vocab: int) -> list[Arrival]:
        return [
            Arrival(f"stream {i}", random_ids(f"{seed} {i}", prompt, vocab), tokens + early)
            for i in range(batch)
        ]

    return Case(_named("tg", tokens, depth), "tg", batch, prompt + tokens + early, make, tokens, prompt)


def staggered(streams: int = 8, prompt: int = 128, tokens: int = 64) -> Case:
    """One more request whenever another eighth of an answer has been said."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        return [
            Arrival(f"stream {i}", random_ids(f"{seed} {i}", prompt, vocab), tokens, after=i * tokens // 8)
            for i in range(streams)
        ]

    return Case("staggered", "load", streams, prompt + tokens, make, tokens, at_once=False)


def ragged(streams: int = 16, shortest: int = 32, longest: int = 1024, tokens: int = 64) -> Case:
    """Prompts from `shortest` to `longest` tokens, evenly spaced by their logarithm, shuffled."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        ratio = (longest / shortest) ** (1 / (streams - 1))
        lengths = [round(shortest * ratio**i) for i in range(streams)]
        random.Random(seed).shuffle(lengths)
        return [
            Arrival(f"stream {i}", random_ids(f"{seed} {i}", length, vocab), tokens)
            for i, length in enumerate(lengths)
        ]

    return Case("ragged", "load", streams, longest + tokens, make, tokens)


def shared_prefix(streams: int = 8, prefix: int = 512, tail: int = 32, tokens: int = 32) -> Case:
    """A long beginning in common; the others arrive when the first one has its first token."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        shared = random_ids(f"{seed} shared", prefix, vocab)
        return [
            Arrival(f"stream {i}", shared + random_ids(f"{seed} {i}", tail, vocab), tokens, after=int(i > 0))
            for i in range(streams)
        ]

    return Case("shared-prefix", "load", streams, prefix + tail + tokens, make, tokens, at_once=False)


def multi_turn(turns: int = 4, opening: int = 256, prompt: int = 64, tokens: int = 64) -> Case:
    """One conversation: each turn brings the whole history and a little more."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        first = Arrival("turn 0", random_ids(f"{seed} 0", opening, vocab), tokens)
        return [first] + [
            Arrival(
                f"turn {i}",
                random_ids(f"{seed} {i}", prompt, vocab),
                tokens,
                after=i * tokens,
                follows=f"turn {i - 1}",
            )
            for i in range(1, turns)
        ]

    return Case("multi-turn", "load", 1, opening + turns * (prompt + tokens), make, tokens, at_once=False)


def admission(streams: int = 7, prompt: int = 2048, first: int = 16, room: int = 960) -> Case:
    """A prompt of `prompt` tokens comes in while streams run; over when it has said two tokens."""

    def make(seed: str, vocab: int) -> list[Arrival]:
        running = [
            Arrival(f"stream {i}", random_ids(f"{seed} {i}", first, vocab), room) for i in range(streams)
        ]
        long = random_ids(f"{seed} long", prompt, vocab)
        return [*running, Arrival("long", long, 2, after=streams * (QUIET + 1), intrudes=True)]

    return Case("admission", "admission", streams, max(prompt + 2, first + room), make, at_once=False)


def of_texts(name: str, tokens: int) -> Case:
    """An answer to a conversation, at most `tokens` long, one stream."""
    return Case(name, "text", 1, _TEMPLATE + tokens, tokens=tokens, texts=TEXTS[name])


WORKLOADS: dict[str, Callable[[], Case]] = {
    "staggered": staggered,
    "ragged": ragged,
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "admission": admission,
    "edit": partial(of_texts, "edit", 400),
    "code": partial(of_texts, "code", 300),
    "chat": partial(of_texts, "chat", 96),
}


class Arriving:
    """Who is due, given what has come: the same for every system."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._waiting = list(arrivals)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def due(self, run: Trace, now: float) -> list[tuple[Arrival, Stream]]:
        """Take out those that are; their streams are in the trace from now on."""
        if not self._waiting:
            return []
        ended = {stream.name: stream for stream in run.streams if stream.ended}
        count = run.num_tokens
        found = []
        for arrival in self._waiting.copy():
            if count < arrival.after or (arrival.follows and arrival.follows not in ended):
                continue
            before = ended.get(arrival.follows)
            history = [*before.prompt, *before.ids] if before else []
            prompt = [*history, *arrival.prompt]
            stream = Stream(arrival.name, prompt, now, measured=arrival.measured, intrudes=arrival.intrudes)
            run.streams.append(stream)
            self._waiting.remove(arrival)
            found.append((arrival, stream))
        return found


def random_ids(seed: str, length: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(min(_FIRST_ID, vocab - 1), vocab), k=length)


def _named(kind: str, tokens: int, depth: int) -> str:
    return f"{kind}{tokens}" + (f" @ d{depth}" if depth else "")
