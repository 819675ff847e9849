"""One client used from threads and event loops at the same time: nothing is lost or mixed up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import partial

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.messages import Delta, Failed, Finished, RequestEvent
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.stream import RequestStream

from .client_driver import ENDLESS, SHORT, WAIT, Make, until

CONFIG = EngineConfig(backend="fake", max_model_len=20_000, max_num_seqs=6)  # so that some wait, too
TURNS = 4
THREADS, LOOPS = 4, 2
SAMPLES = SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=3, ignore_eos=True)

Answer = dict[str, tuple[str, tuple[int, ...], str]]  # by request: text, ids, finish reason
Answers = dict[str, Answer]  # by prompt


def answer(events: list[RequestEvent]) -> Answer:
    """What came for each request; its end is its last event, and there is no other."""
    found: Answer = {}
    for name in dict.fromkeys(event.request_id for event in events):
        *deltas, end = (event for event in events if event.request_id == name)
        parts = [delta for delta in deltas if isinstance(delta, Delta)]
        assert len(parts) == len(deltas)
        assert isinstance(end, Finished), end
        ids = tuple(token for delta in parts for token in delta.token_ids)
        assert end.usage.completion_tokens == len(ids)
        found[name] = "".join(delta.text for delta in parts), ids, end.finish_reason
    return found


def asked(worker: int, turn: int) -> tuple[str, SamplingParams, str]:
    params = SAMPLES if turn % 2 else SHORT
    return f"worker {worker} asks {turn} things", params, f"w{worker}t{turn}"


async def events_of(stream: RequestStream) -> list[RequestEvent]:
    return [event async for event in stream]


def run_at_once(works: Iterable[Callable[[], None]]) -> list[BaseException]:
    """Each in a thread of its own; returns what they raised."""
    faults: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return faults


def test_threads_and_event_loops_together(make: Make) -> None:
    """Each asks, stops an endless answer, and drops another, again and again."""
    client = make(CONFIG)
    client.start(WAIT)
    submit = client.submit
    workers = range(THREADS + LOOPS)
    alone = {
        name: answer(list(submit(prompt, params, name)))
        for prompt, params, name in (asked(worker, turn) for worker in workers for turn in range(TURNS))
    }
    together: Answers = {}

    def in_thread(worker: int) -> None:
        for turn in range(TURNS):
            prompt, params, name = asked(worker, turn)
            stream = submit(prompt, params, name)  # first, so that no seat is held by who waits for one
            stopped, dropped = submit(f"{name} on and on", ENDLESS), submit(f"{name} in vain", ENDLESS)
            together[name] = answer(list(stream))
            dropped.close()
            stopped.abort()
            assert [end for _, _, end in answer(list(stopped)).values()] == ["abort"]

    async def in_task(worker: int, turn: int) -> None:
        prompt, params, name = asked(worker, turn)
        stream = submit(prompt, params, name)
        stopped, dropped = submit(f"{name} on and on", ENDLESS), submit(f"{name} in vain", ENDLESS)
        cancelled = asyncio.create_task(events_of(dropped))
        together[name] = answer(await events_of(stream))
        cancelled.cancel()
        dropped.close()
        stopped.abort()
        assert [end for _, _, end in answer(await events_of(stopped)).values()] == ["abort"]

    async def in_loop(worker: int) -> None:
        await asyncio.gather(*(in_task(worker, turn) for turn in range(TURNS)))

    kinds = [in_thread] * THREADS + [lambda worker: asyncio.run(in_loop(worker))] * LOOPS
    assert run_at_once(partial(kinds[worker], worker) for worker in workers) == []
    assert together == alone
    until(lambda: client.last_step is not None and client.last_step.kv.used_blocks == 0)
    assert client._mailboxes == {}
    ends = dict(client.totals().ended)
    per_worker = TURNS + TURNS // 2  # n is 2 in every second turn
    assert ends["length"] == 2 * len(workers) * per_worker
    assert ends["abort"] == len(workers) * TURNS * 2
    assert set(ends) == {"length", "abort"}


def test_close_from_a_thread_ends_what_all_others_wait_for(make: Make) -> None:
    client = make(CONFIG)
    client.start(WAIT)
    ends: dict[str, RequestEvent] = {}

    def in_thread(name: str) -> None:
        ends[name] = list(client.submit("go on", ENDLESS, name))[-1]

    def in_loop(name: str) -> None:
        async def consume() -> RequestEvent:
            return [event async for event in client.submit("go on", ENDLESS, name)][-1]

        ends[name] = asyncio.run(consume())

    kinds = {f"thread {i}": in_thread for i in range(THREADS)} | {f"loop {i}": in_loop for i in range(LOOPS)}
    threads = [threading.Thread(target=run, args=(name,)) for name, run in kinds.items()]
    for thread in threads:
        thread.start()
    until(lambda: len(client._mailboxes) == len(kinds))
    closer = threading.Thread(target=client.close)
    closer.start()
    for thread in (*threads, closer):
        thread.join(WAIT)
    assert set(ends) == set(kinds)
    assert all(isinstance(end, Failed) and "closed" in str(end.error) for end in ends.values())


def test_a_stream_shared_by_threads_gives_each_event_once_and_ends_for_all(make: Make) -> None:
    client = make(CONFIG)
    client.start(WAIT)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    whole = answer(list(client.submit("hello", params, "mine")))
    stream = client.submit("hello", params, "mine")
    taken: list[list[RequestEvent]] = [[], [], []]
    threads = [threading.Thread(target=lambda i=i: taken[i].extend(stream)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    ids = [event.token_ids for events in taken for event in events if isinstance(event, Delta)]
    assert len(ids) == 400
    assert sorted(token for each in ids for token in each) == sorted(whole["mine"][1])
    assert sum(isinstance(event, Finished) for events in taken for event in events) == 1


def test_a_prompt_changed_after_it_was_sent_was_sent_as_it_was(make: Make) -> None:
    client = make(CONFIG)
    starter = threading.Thread(target=client.start)
    asked, ids = [{"role": "user", "content": "hello"}], list(b"hello")
    starter.start()
    until(lambda: client._transport is not None)
    streams = [client.submit(asked, SHORT), client.submit(ids, SHORT)]  # while it loads, so before it reads
    asked[0]["content"] = "something else"
    asked.append({"role": "assistant", "content": "hm"})
    ids.append(0)
    ends = [next(event for event in stream if isinstance(event, Finished)) for stream in streams]
    assert [end.usage.prompt_tokens for end in ends] == [6, 5]
    starter.join(WAIT)
