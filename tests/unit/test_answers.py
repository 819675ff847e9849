"""Streams of several samples: which requests they are made of, and what their events come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ferrum_mlx.answers import Collector, OutputDelta, collect
from ferrum_mlx.batch import TokenLogprobs
from ferrum_mlx.client import EngineClient
from ferrum_mlx.errors import CapacityError, FerrumError, UsageError
from ferrum_mlx.messages import Command, Delta, Failed, Finished, RequestEvent, Submit
from ferrum_mlx.metrics import Latencies, RequestStats, Timings, Usage
from ferrum_mlx.sampling import SamplingParams

from .client_driver import FAKE, Scripted

HOT = SamplingParams(temperature=1.0, n=3, prompt_logprobs=1)
STATS = RequestStats(
    request_id="1",
    priority=0,
    finish_reason="length",
    arrived=0.0,
    queue_s=0.0,
    prefill_s=0.0,
    decode_s=0.0,
    e2e_s=0.0,
    usage=Usage(9, 2, 0),
    timings=Timings(1.0, 2.0, 3.0),
    itl=Latencies(),
    preemptions=0,
    replayed_tokens=0,
)


class Recorder(Scripted):
    """Keeps what the client sends."""

    sent: list[Command]

    def send(self, command: Command) -> None:
        self.sent.append(command)


@pytest.fixture
def client() -> EngineClient:
    Recorder.posts, Recorder.sent = [], []
    client = EngineClient(FAKE, Recorder)
    client._launch()
    return client


def submits() -> list[Submit]:
    return [command for command in Recorder.sent if isinstance(command, Submit)]


def logprobs(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5, 1) for token in tokens)


def finished(request_id: str, completion: int = 2, cached: int = 0, prompt: int = 0) -> Finished:
    stats = replace(STATS, request_id=request_id, usage=Usage(9, completion, cached))
    return Finished(request_id, stats, logprobs(*range(prompt)))


def post(*events: RequestEvent) -> None:
    Recorder.posts[-1](events)


def test_samples_are_ordinary_requests_of_one_seed(client: EngineClient) -> None:
    plain = SamplingParams(temperature=1.0)
    stream = client.submit_all([("a", plain), ("b", HOT), ("c", replace(HOT, seed=0, n=2))])
    assert stream.request_ids == ("1", "2.0", "2.1", "2.2", "3.0", "3.1")
    assert list(stream.places.values()) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    sent = submits()
    assert [s.request_id for s in sent] == list(stream.request_ids)
    assert [(s.prompt, s.sample_index) for s in sent] == [
        *(("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("c", 1))
    ]
    assert sent[0].params == plain
    assert [s.params.n for s in sent] == [1] * 6
    seeds = [s.params.seed for s in sent]
    assert seeds[0] is None
    assert None not in seeds[1:4]
    assert len(set(seeds[1:4])) == 1
    assert seeds[4:] == [0, 0]
    assert [s.params.prompt_logprobs for s in sent] == [None, 1, None, None, 1, None]
    client.submit("b", HOT)
    assert submits()[-1].params.seed != seeds[1]


def test_ids_of_samples_are_unique_among_open_requests(client: EngineClient) -> None:
    streams = [client.submit("a", HOT, request_id="mine"), client.submit("a", request_id="1.2")]
    streams.append(client.submit("a", HOT))
    assert streams[-1].request_ids == ("2.0", "2.1", "2.2")
    with pytest.raises(UsageError, match=r"mine\.1"):
        client.submit("b", request_id="mine.1")
    with pytest.raises(UsageError, match=r"x\.1"):
        client.submit_all([("a", HOT), ("b", SamplingParams())], ["x", "x.1"])
    assert len(submits()) == 7


def test_outputs_hold_every_sample_and_count_the_prompt_once(client: EngineClient) -> None:
    stream = client.submit_all([("a", HOT), ("b", SamplingParams())])
    post(
        Delta("1.1", "x", (5,), logprobs=logprobs(5)),
        Delta("2", "only", (1, 2), "hm"),
        Delta("1.0", "a", (7,), logprobs=logprobs(7)),
        finished("1.1", 1, cached=8),
        Delta("1.0", "b", (8,), logprobs=logprobs(8)),
        Delta("1.2", "z", (9,)),
        finished("2", 2, cached=4),
        finished("1.2", 1, cached=8),
        finished("1.0", 2, cached=4, prompt=3),
    )
    first, second = collect(stream)
    assert [output.text for output in first.outputs] == ["ab", "x", "z"]
    assert first.outputs == (first, *first.others)
    assert [output.token_ids for output in first.outputs] == [(7, 8), (5,), (9,)]
    assert [output.logprobs for output in first.outputs] == [logprobs(7, 8), logprobs(5), ()]
    assert [len(output.prompt_logprobs) for output in first.outputs] == [3, 0, 0]
    assert {output.usage for output in first.outputs} == {Usage(9, 4, 4)}
    assert first.stats is not None
    assert first.stats.request_id == "1.0"
    assert (second.outputs, second.usage, second.thinking) == ((second,), Usage(9, 2, 4), "hm")


def test_deltas_name_their_sample_and_the_last_has_the_output(client: EngineClient) -> None:
    collector = Collector(client.submit("a", replace(HOT, n=2)))
    events: list[RequestEvent] = [
        Delta("1.1", "x", (5,), logprobs=logprobs(5)),
        finished("1.1"),
        Delta("1.0", "a", (7,)),
        finished("1.0"),
    ]
    deltas = [collector.add(event) for event in events]
    assert deltas[0] == OutputDelta(0, "x", (5,), sample=1, logprobs=logprobs(5))
    assert [(delta.sample, delta.output is None) for delta in deltas] == [
        *((1, True), (1, True), (0, True), (0, False))
    ]


def test_a_sample_that_fails_leaves_the_others(client: EngineClient) -> None:
    stream = client.submit("a", HOT)
    error = CapacityError(3, 1)
    post(Delta("1.0", "a", (7,)), Failed("1.0", error), finished("1.1", 5), finished("1.2", 6, cached=3))
    collector = Collector(stream)
    output = [collector.add(event) for event in stream][-1].output
    collector.raise_if_all_failed()
    assert output is not None
    assert [(o.finish_reason, o.error) for o in output.outputs] == [
        *(("error", error), ("length", None), ("length", None))
    ]
    assert (output.text, output.stats, output.usage) == ("a", None, Usage(9, 11, 0))


def test_when_all_samples_failed_the_first_s_error_is_raised(client: EngineClient) -> None:
    stream = client.submit_all([("a", HOT), ("b", SamplingParams())])
    post(*(Failed(name, FerrumError(name)) for name in reversed(stream.request_ids)))
    collector = Collector(stream)
    assert len([collector.add(event) for event in stream]) == 4
    with pytest.raises(FerrumError, match=r"^1\.0$"):
        collector.raise_if_all_failed()
