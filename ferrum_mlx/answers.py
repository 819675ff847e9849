"""What the events of a stream come to: deltas as they happen, and one output a prompt."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from ferrum_mlx.batch import TokenLogprobs
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import Delta, Failed, Finished, RequestEvent
from ferrum_mlx.metrics import RequestStats, Timings, Usage
from ferrum_mlx.stream import RequestStream


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt's whole answer; with params.n above 1 its first sample, which has the others.

    Attributes:
        text: the answer alone; give it back as the assistant's message.
        thinking: what a reasoning model said to itself in a conversation; "" for bare prompts.
        finish_reason: "stop", "length", "abort" or "error".
        usage: of all samples together, the prompt counted once; zeros after an error.
        timings: zeros after an error.
        error: why it failed; the text that came before stands in `text`.
        stats: latencies, queue time, preemptions; None after an error.
        logprobs: one a token id, where params ask for them.
        prompt_logprobs: of the prompt's second token on, where params ask for them; the first sample's.
        others: the samples after the first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    error: FerrumError | None = None
    stats: RequestStats | None = None
    thinking: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    others: tuple[RequestOutput, ...] = ()

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All samples, this one first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of a sample of the prompt at `index`; the prompt's last delta carries its whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    thinking: str = ""
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class _Sample:
    """What has come of one request of a stream."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | Failed | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.thoughts.append(delta.thinking)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def output(self) -> RequestOutput:
        finished = self.end if isinstance(self.end, Finished) else None
        return RequestOutput(
            "".join(self.texts),
            tuple(self.token_ids),
            finished.finish_reason if finished else "error",
            finished.usage if finished else Usage(0, 0, 0),
            finished.timings if finished else Timings(0.0, 0.0, 0.0),
            error=self.end.error if isinstance(self.end, Failed) else None,
            stats=finished.stats if finished else None,
            thinking="".join(self.thoughts),
            logprobs=tuple(self.logprobs),
            prompt_logprobs=finished.prompt_logprobs if finished else (),
        )


class Collector:
    """Turns the events of a stream into deltas, and at each prompt's end into its output."""

    def __init__(self, stream: RequestStream) -> None:
        self._places = stream.places
        self._samples: dict[int, list[_Sample]] = defaultdict(list)  # by the prompt's index
        for index, _ in self._places.values():
            self._samples[index].append(_Sample())

    def add(self, event: RequestEvent) -> OutputDelta:
        index, number = self._places[event.request_id]
        samples = self._samples[index]
        if isinstance(event, Delta):
            samples[number].add(event)
            return OutputDelta(
                index,
                event.text,
                event.token_ids,
                thinking=event.thinking,
                sample=number,
                logprobs=event.logprobs,
            )
        samples[number].end = event
        output = _together(samples) if all(sample.end for sample in samples) else None
        return OutputDelta(index, "", (), output, sample=number)

    def raise_if_all_failed(self) -> None:
        ends = [sample.end for samples in self._samples.values() for sample in samples]
        errors = [end.error for end in ends if isinstance(end, Failed)]
        if errors and len(errors) == len(ends):
            raise errors[0]


def collect(events: RequestStream) -> list[RequestOutput]:
    """Wait for every request of a stream; one output a prompt, in order, errors included."""
    collector = Collector(events)
    with events:
        return in_order([collector.add(event) for event in events])


def in_order(deltas: list[OutputDelta]) -> list[RequestOutput]:
    """The outputs among them, in the order of the prompts."""
    outputs = {delta.index: delta.output for delta in deltas if delta.output is not None}
    return [outputs[index] for index in sorted(outputs)]


def _together(samples: list[_Sample]) -> RequestOutput:
    outputs = [sample.output() for sample in samples]
    usages = [output.usage for output in outputs if output.error is None]
    usage = Usage(
        prompt_tokens=max((usage.prompt_tokens for usage in usages), default=0),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        # The other samples find what the first one computed: that is no part of what the prompt found.
        cached_tokens=min((usage.cached_tokens for usage in usages), default=0),
    )
    first, *others = (replace(output, usage=usage) for output in outputs)
    return replace(first, others=tuple(others))
