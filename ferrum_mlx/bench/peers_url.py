"""Any server that speaks OpenAI's completions, streaming: one thread a request.

Prompts go as token ids, and as text to a server that takes none. A time is a chunk's arrival; where a
chunk holds several tokens, they share it. What is measured includes HTTP.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from time import perf_counter
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ferrum_mlx.bench.systems import PeerAbsentError
from ferrum_mlx.bench.trace import Stream, Trace
from ferrum_mlx.bench.workloads import Arrival, Arriving, Case
from ferrum_mlx.errors import FerrumError, one_line
from ferrum_mlx.output import TextCodec

_TIMEOUT = 600.0  # seconds without a byte
_REFUSALS = (400, 422, 500)  # what servers say to a prompt of ids


@dataclass(slots=True)
class _Answer:
    """What has come of a request; `usage` is the server's own count."""

    stream: Stream
    expected: int
    chunks: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def settle(self) -> None:
        """Chunks to tokens.

        Raises:
            FerrumError: it failed, or is not as long as it was asked to be.
        """
        if self.error is not None:
            raise FerrumError(f"the server failed: {one_line(self.error)}") from self.error
        count = self.usage.get("completion_tokens", len(self.chunks))
        if count != self.expected or not self.chunks:
            raise FerrumError(f"{count} tokens came instead of {self.expected}: it does not ignore_eos")
        self.stream.times = [self.chunks[i * len(self.chunks) // count] for i in range(count)]
        given = self.usage.get("prompt_tokens", len(self.stream.prompt))
        if given != len(self.stream.prompt):  # as text: the ids are the server's, their number counts
            self.stream.prompt = [0] * given
        self.stream.cached_tokens = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Remote:
    """`url`: of the server, with or without /v1."""

    same_weights = False

    def __init__(self, name: str, url: str, codec: TextCodec) -> None:
        self.name = name
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._codec = codec
        self._model = ""
        self._as_text = False

    def wait(self, seconds: float, alive: Callable[[], bool]) -> None:
        """Until the server answers.

        Raises:
            PeerAbsentError: it does not.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and alive():
            try:
                self.find_model()
                return
            except PeerAbsentError:
                time.sleep(0.2)
        raise PeerAbsentError(f"{self.name} did not start, or not within {seconds:.0f} s")

    def method(self, case: Case) -> str:
        return "HTTP, prompts as text" if self._as_text else "HTTP"

    def refusal(self, case: Case) -> str:
        if case.kind == "pp" and case.depth:
            return "what a server keeps between requests is its own matter"
        return "what was said is needed as ids" if case.name == "multi-turn" else ""

    def close(self) -> None:
        """Nothing is held."""

    def run(self, case: Case, arrivals: Sequence[Arrival]) -> Trace:
        run, arriving = Trace(), Arriving(arrivals)
        news: Queue[None] = Queue()
        answers: list[_Answer] = []
        stop = threading.Event()
        threads: list[threading.Thread] = []
        try:
            while True:
                for arrival, stream in arriving.due(run, perf_counter()):
                    answers.append(_Answer(stream, arrival.max_tokens))
                    thread = threading.Thread(target=self._ask, args=(answers[-1], news, stop), daemon=True)
                    threads.append(thread)
                    thread.start()
                if all(answer.stream.ended for answer in answers):
                    break
                if case.until_first_end and any(answer.stream.ended for answer in answers):
                    break
                news.get()
        finally:
            stop.set()
        for thread in threads:
            thread.join(_TIMEOUT)
        for answer in answers:
            if answer.stream.ended or answer.error is not None:
                answer.settle()
            else:
                answer.stream.times = answer.chunks  # cut short: a chunk stands for a token
        return run

    def _ask(self, answer: _Answer, news: Queue[None], stop: threading.Event) -> None:
        try:
            for chunk in self._stream(answer.stream.prompt, answer.expected):
                if stop.is_set():
                    return
                if chunk.get("choices"):
                    now = perf_counter()
                    answer.chunks.append(now)
                    answer.stream.times.append(now)
                answer.usage = chunk.get("usage") or answer.usage
                news.put(None)
        except Exception as error:
            answer.error = error
        answer.stream.ended = True
        news.put(None)

    def _stream(self, prompt: Sequence[int], tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "model": self._model,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "cache_prompt": False,  # llama-server's; the same text may be measured twice
        }
        with self._post(body, prompt) as response:
            for line in response:
                data = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
                if data.startswith("{"):
                    yield json.loads(data)

    def _post(self, body: dict[str, Any], prompt: Sequence[int]) -> Any:
        if not self._as_text:
            try:
                return _send(f"{self._base}/completions", body | {"prompt": list(prompt)})
            except HTTPError as error:
                if error.code not in _REFUSALS:
                    raise
                self._as_text = True
        detokenizer = self._codec.detokenizer()
        text = "".join(detokenizer.add(token) for token in prompt) + detokenizer.finish()
        return _send(f"{self._base}/completions", body | {"prompt": text})

    def find_model(self) -> None:
        """Ask for the first model that is served.

        Raises:
            PeerAbsentError: there is no server, or no model.
        """
        try:
            with urlopen(f"{self._base}/models", timeout=10) as response:
                self._model = str(json.load(response)["data"][0]["id"])
        except (URLError, OSError, ValueError, KeyError, IndexError) as error:
            raise PeerAbsentError(f"no server answers at {self._base}/models: {one_line(error)}") from error


def _send(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    return urlopen(Request(url, json.dumps(body).encode(), headers), timeout=_TIMEOUT)
