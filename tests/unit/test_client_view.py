"""What EngineClient tells people of an engine: its requests, a prompt's tokens, facts of the load."""

from __future__ import annotations

import pickle

import pytest

from ferrum_mlx.backends.fake import FakeCodec
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.errors import EngineDiedError, FerrumError, UsageError
from ferrum_mlx.messages import Ask, AskTokenCount, AskView, ChatOptions, Submit
from ferrum_mlx.metrics import KVMap
from ferrum_mlx.request import RequestState
from ferrum_mlx.view import VIEWED_REQUESTS, EngineView, RequestView

from .client_driver import ENDLESS, FAKE, LONG_CONTEXT, SHORT, WAIT, Make, first_delta, text_of, until

HELLO = [{"role": "user", "content": "hello"}]


def test_view_of_an_idle_engine(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    view = client.view(WAIT)
    assert (view.requests, view.more_requests, view.itl.count) == ((), 0, 0)
    assert view.kv == client.kv_map(WAIT)
    assert view.memory_bytes == view.peak_memory_bytes > 0


def test_view_of_an_engine_at_work(make: Make) -> None:
    client = make(EngineConfig(backend="fake", max_model_len=200_000, max_num_seqs=1))
    client.start(WAIT)
    running = client.submit("go on", ENDLESS, "first")
    first_delta(running)
    waiting = client.submit(HELLO, SHORT, "second")
    view = client.view(WAIT)
    first, second = view.requests
    assert (first.request_id, first.state, first.prompt_tokens) == ("first", "decode", 5)
    assert first.output_tokens > 0
    assert first.computed_tokens == first.prompt_tokens + first.output_tokens - 1
    assert 0 < first.ttft_s <= first.age_s
    assert (second.request_id, second.state, second.output_tokens, second.ttft_s) == (
        "second",
        "waiting",
        0,
        0,
    )
    assert sum(count > 0 for count in view.kv.blocks[0]) * 16 >= first.computed_tokens
    running.close()
    waiting.close()


def test_view_of_more_requests_than_anyone_reads(built: list[Engine]) -> None:
    with EngineClient.in_thread(LONG_CONTEXT) as client:
        client.start(WAIT)
        streams = [client.submit(f"prompt {i}", ENDLESS) for i in range(VIEWED_REQUESTS + 3)]
        until(lambda: client.view(WAIT).more_requests == 3)
        assert len(client.view(WAIT).requests) == VIEWED_REQUESTS
        for stream in streams:
            stream.close()


def test_a_prefill_and_a_preempted_request_are_seen(built: list[Engine]) -> None:
    with EngineClient.in_thread(FAKE) as client:
        client.start(WAIT)
        text_of(client.submit("hello", SHORT))
    engine = built[0]
    stream = engine._intake.take(Submit("r", "x" * 100, SHORT), 0.0)
    request, now = stream.request, 2.0
    request.state, request.num_computed_tokens = RequestState.RUNNING, 25
    stream.timer.scheduled(1.0)
    seen = stream.view(now)
    assert (seen.state, seen.prefill_share, seen.tokens_per_second) == ("prefill", 0.25, 25.0)
    request.state, request.num_computed_tokens, request.preemptions = RequestState.PREEMPTED, 0, 1
    assert (stream.view(now).state, stream.view(now).preemptions) == ("preempted", 1)


def test_tokens_of_text_and_conversations(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    assert client.count_tokens("héllo", timeout=WAIT) == 6
    assert client.count_tokens(HELLO, timeout=WAIT) == 6
    thinking = ChatOptions(thinking=True)
    assert client.count_tokens(HELLO, thinking, WAIT) == len(FakeCodec().encode_chat(HELLO, thinking)) > 6
    stream = client.submit("go on", ENDLESS)  # and between two steps
    first_delta(stream)
    assert client.count_tokens("x" * 50_000, timeout=WAIT) == 50_000
    stream.close()


def test_what_cannot_be_counted_is_refused_and_harms_nobody(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    with pytest.raises(UsageError, match="not all ids"):
        client.count_tokens([1, -2], timeout=WAIT)
    with pytest.raises(FerrumError, match="the prompt failed: KeyError"):
        client.count_tokens([{"role": "user"}], timeout=WAIT)
    assert len(text_of(client.submit("hello", SHORT))) == 12


def test_what_cannot_be_sent_is_refused() -> None:
    with EngineClient.in_process(FAKE) as client:
        client.start(WAIT)
        with pytest.raises(UsageError, match="cannot be sent"):
            client.count_tokens([{"role": "user", "content": lambda: 0}], timeout=WAIT)


def test_no_view_without_an_engine(make: Make) -> None:
    with pytest.raises(EngineDiedError, match="not started"):
        make(FAKE).view(WAIT)


def test_ready_says_what_the_engine_holds(make: Make) -> None:
    ready = make(EngineConfig(backend="fake", speculative="ngram")).start(WAIT)
    assert ready.speculation == "ngram"
    assert ready.memory.kv_pool_bytes > 0
    assert (ready.capabilities.off, ready.memory_limit_bytes) == ((), 0)
    assert make(FAKE).start(WAIT).speculation == ""


def test_totals_keep_the_latest_ttfts_and_request(make: Make) -> None:
    client = make(FAKE)
    client.start(WAIT)
    stats = [list(client.submit(text, SHORT))[-1].stats for text in ("hello", "again")]  # type: ignore[union-attr]
    totals = client.totals()
    assert list(totals.latest_ttft_s) == [each.timings.ttft_s for each in stats]
    assert totals.last_request == stats[-1]
    assert totals.decode_tokens == sum(each.usage.completion_tokens - 1 for each in stats)


def test_questions_cross_to_another_process() -> None:
    for message in (Ask(1, AskView()), Ask(2, AskTokenCount("hello"))):
        assert pickle.loads(pickle.dumps(message)) == message
    request = RequestView(
        request_id="r",
        state="prefill",
        prompt_tokens=10,
        computed_tokens=5,
        cached_tokens=0,
        output_tokens=0,
        age_s=1.0,
        ttft_s=0.0,
        tokens_per_second=5.0,
        preemptions=0,
    )
    view = EngineView(kv=KVMap((), ()), requests=(request,))
    assert pickle.loads(pickle.dumps(view)) == view
