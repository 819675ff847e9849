"""EngineClient: how everything above the engine speaks to it, from any thread or event loop.

One API over two transports (ferrum_mlx.transport): an engine in a thread, or in a child process.
"""

from __future__ import annotations

import atexit
import copy
import functools
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import EngineDiedError, FerrumError, UsageError, shown
from ferrum_mlx.events import Callback
from ferrum_mlx.messages import (
    Answer,
    Answered,
    AskKVMap,
    AskTokenCount,
    AskView,
    ChatOptions,
    Command,
    Delta,
    Died,
    Event,
    Failed,
    Finished,
    Hold,
    Loading,
    Notice,
    Prompt,
    Question,
    Ready,
    Stepped,
)
from ferrum_mlx.metrics import KVMap, StepStats
from ferrum_mlx.questions import Questions
from ferrum_mlx.samples import own, sample_ids, samples
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.stream import Mailbox, RequestStream
from ferrum_mlx.totals import Totals
from ferrum_mlx.transport import Post, ProcessTransport, ThreadTransport, Transport
from ferrum_mlx.view import EngineView

_log = logging.getLogger("ferrum_mlx")
_PATIENCE = 5.0  # seconds a ready engine has to finish its step and shut down


class EngineClient:
    """An engine, wherever it runs. All methods may be called from any thread.

    Args:
        config: the engine's settings.
        transport: how the engine runs; `in_thread` and `in_process` choose it.
        on_loading: told each stage of the engine's start, in words; called from another thread.
        on_died: told why an engine ended that nobody closed; called from another thread.
        on_note: told what a user must know of an engine that runs; called from another thread.

    What these three raise is logged, and harms no request.
    """

    def __init__(
        self,
        config: EngineConfig,
        transport: Callable[[EngineConfig, Post], Transport],
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.on_loading = on_loading
        self.on_died = on_died
        self.on_note = on_note
        self._transport_type = transport
        self._transport: Transport | None = None
        self._life = 0  # counts engines, so that a late word of an old one is not taken for the new one's
        self._closings = 0
        self._changed = threading.Condition(threading.RLock())
        self._mailboxes: dict[str, Mailbox] = {}
        self._ready: Ready | None = None
        self._death: FerrumError | None = None
        self._totals = Totals()
        self._numbers = itertools.count(1)
        self._questions = Questions(self._changed)

    @classmethod
    def in_thread(
        cls,
        config: EngineConfig,
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        on_event: Callback | None = None,
    ) -> Self:
        """An engine in a thread of this process; `on_event` is given its records, in that thread."""
        launch = functools.partial(ThreadTransport, on_event=on_event)
        return cls(config, launch, on_loading, on_died, on_note)

    @classmethod
    def in_process(
        cls,
        config: EngineConfig,
        on_loading: Callable[[str], None] | None = None,
        on_died: Callable[[FerrumError], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> Self:
        """An engine in a spawned child process, whose death this process survives."""
        return cls(config, ProcessTransport, on_loading, on_died, on_note)

    @property
    def ready(self) -> Ready | None:
        """What the engine announced; None while it loads and after it died."""
        return self._ready if self._death is None else None

    @property
    def death(self) -> FerrumError | None:
        """Why the engine ended; None while it loads or runs."""
        return self._death

    @property
    def last_step(self) -> StepStats | None:
        """The engine's latest step; None before its first."""
        return self._totals.last_step

    def totals(self) -> Totals:
        """Sums since this engine was started: a copy, which no later event changes."""
        with self._changed:
            return copy.deepcopy(self._totals)

    def kv_map(self, timeout: float = 5.0) -> KVMap:
        """The state of every KV block between two steps; waits for the step that runs.

        Not to be called from the client's callbacks: the answer would come in their thread. The same
        goes for `view` and `count_tokens`.

        Raises:
            FerrumError: no answer within `timeout` seconds (a long step, or the engine still loads),
                or EngineDiedError.
        """
        answer = self._ask(AskKVMap(), timeout)
        assert isinstance(answer, KVMap)
        return answer

    def view(self, timeout: float = 5.0) -> EngineView:
        """KV blocks, open requests and memory between two steps; waits and raises like `kv_map`."""
        answer = self._ask(AskView(), timeout)
        assert isinstance(answer, EngineView)
        return answer

    def count_tokens(self, prompt: Prompt, chat: ChatOptions | None = None, timeout: float = 5.0) -> int:
        """The tokens that a prompt would have, the template's own included; waits and raises like `kv_map`.

        Raises:
            UsageError: it cannot be a prompt.
        """
        answer = self._ask(AskTokenCount(own(prompt), chat or ChatOptions()), timeout)
        assert isinstance(answer, int)
        return answer

    def start(self, timeout: float | None = None) -> Ready:
        """Start the engine, unless it runs, and wait until it accepts requests.

        Raises:
            FerrumError: what ended the build, or EngineDiedError after `timeout` seconds, where no
                process can be started, and after `close`.
        """
        with self._changed:
            if self._transport is None and self._death is None:
                self._launch()
            if not self._changed.wait_for(lambda: self._ready or self._death, timeout):
                raise EngineDiedError(f"the engine was not ready after {timeout:g} s")
            if self._death is not None:
                raise self._death
            assert self._ready is not None
            return self._ready

    def restart(self, timeout: float | None = None) -> Ready:
        """Bring up a new engine in place of one that died, failed to start or was closed; see `start`.

        Of two threads that do so at once, one waits for the other's engine; after a `close` meanwhile
        there is none.
        """
        closings = self._closings
        self._end()
        with self._changed:
            if self._death is not None and self._closings == closings:
                self._transport, self._ready, self._death, self._totals = None, None, None, Totals()
                self._launch()
        return self.start(timeout)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        chat: ChatOptions | None = None,
        adapter: str = "",
    ) -> RequestStream:
        """Queue one request; see `submit_all`."""
        ids = [request_id] if request_id else None
        return self.submit_all([(prompt, params or SamplingParams())], ids, chat, [adapter])

    def submit_all(
        self,
        requests: Sequence[tuple[Prompt, SamplingParams]],
        request_ids: Sequence[str] | None = None,
        chat: ChatOptions | None = None,
        adapters: Sequence[str] | None = None,
    ) -> RequestStream:
        """Queue requests whose events come in one stream, in the order they happen.

        An engine that still loads takes them when it is ready. A request that cannot run, for want
        of an engine or a fault of its own, ends in Failed. `chat` says how conversations are templated.
        One with n samples becomes n requests, "ID.0" to "ID.<n - 1>", of the same seed. A prompt that
        its owner changes afterwards stays here as it is. `adapters` names the LoRA adapter of each request,
        "" for none; without it all go without one.

        Raises:
            UsageError: a request_id that is in use.
        """
        with self._changed:
            ids = list(request_ids or (self._free_id(params.n) for _, params in requests))
            chosen = adapters or [""] * len(requests)
            submits = [
                (index, submit)
                for index, (name, (prompt, params), adapter) in enumerate(
                    zip(ids, requests, chosen, strict=True)
                )
                for submit in samples(name, own(prompt), params, chat or ChatOptions(), adapter)
            ]
            counts = Counter(submit.request_id for _, submit in submits)
            taken = [i for i, count in counts.items() if count > 1 or i in self._mailboxes]
            if taken:
                raise UsageError(f"request_id is {shown(taken[0])}", "allowed: one that no open request has")
            mailbox = Mailbox(counts)
            for _, submit in submits:
                if self._transport is None or self._death is not None:
                    mailbox.put(Failed(submit.request_id, self._absence()))
                else:
                    self._mailboxes[submit.request_id] = mailbox
                    self._transport.send(submit)
        places = {submit.request_id: (index, submit.sample_index) for index, submit in submits}
        return RequestStream(places, mailbox, self._send)

    def hold(self, seconds: float) -> None:
        """Let the engine begin no step for so long, or until a stream is aborted, and return at once."""
        self._send(Hold(seconds))

    def close(self) -> None:
        """End the engine and every open stream; idempotent, and bounded in time."""
        self._closings += 1
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        with self._changed:
            transport = self._transport
            patience = _PATIENCE if self.ready else 0.0  # a build may take minutes, so is not waited for
            self._die(EngineDiedError("the engine is closed", next_step="call restart(), or make a new one"))
            self._life += 1
            atexit.unregister(self.close)
        if transport is not None:
            transport.stop(patience)

    def _ask(self, question: Question, timeout: float) -> Answer:
        with self._changed:
            if self._transport is None or self._death is not None:
                raise self._absence()
            return self._questions.ask(question, self._transport.send, timeout)

    def _absence(self) -> FerrumError:
        return self._death or EngineDiedError("the engine is not started", next_step="call start()")

    def _free_id(self, samples: int) -> str:
        names = map(str, self._numbers)
        return next(i for i in names if not self._mailboxes.keys() & set(sample_ids(i, samples)))

    def _launch(self) -> None:
        self._life += 1
        life = self._life
        atexit.register(self.close)
        self._transport = self._transport_type(self.config, lambda events: self._dispatch(life, events))

    def _send(self, command: Command) -> None:
        transport = self._transport
        if transport is not None:
            transport.send(command)

    def _dispatch(self, life: int, events: Sequence[Event]) -> None:
        for event in events:
            with self._changed:
                if life != self._life:
                    return
                self._take(event)
            try:
                self._call_back(event)
            except Exception:
                _log.exception("a callback of EngineClient failed")

    def _call_back(self, event: Event) -> None:
        match event:
            case Loading(what) if self.on_loading:
                self.on_loading(what)
            case Notice(what) if self.on_note:
                self.on_note(what)
            case Died(error) if self.on_died and error is self._death:  # a second Died is an echo
                self.on_died(error)

    def _take(self, event: Event) -> None:
        if self._death is not None:  # its streams have had their end
            return
        match event:
            case Delta(request_id):
                self._totals.add_tokens(len(event.token_ids))
                self._mailboxes[request_id].put(event)
            case Finished(request_id):
                self._totals.add_request(event.stats)
                self._mailboxes.pop(request_id).put(event)
            case Failed(request_id):
                self._totals.add_failure()
                self._mailboxes.pop(request_id).put(event)
            case Stepped(stats):
                self._totals.add_step(stats)
            case Answered(number, answer):
                self._questions.answer(number, answer)
            case Ready():
                self._ready = event
                self._changed.notify_all()
            case Died(error):
                self._die(error)

    def _die(self, error: FerrumError) -> None:
        if self._death is not None:  # closed after a death, or twice
            return
        self._death = error
        for request_id, mailbox in self._mailboxes.items():
            self._totals.add_failure()
            mailbox.put(Failed(request_id, error))
        self._mailboxes.clear()
        self._questions.answer_all(error)
        self._changed.notify_all()
