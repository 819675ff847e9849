"""A hub on this machine whose downloads stand still in the middle."""

from __future__ import annotations

import threading
from typing import Any

from ferrum_mlx import hub_fetch


class SlowHub:
    """A hub that sends the weights up to `upto` and no further until `go` is set.

    Attributes:
        ranges: the Range header of each request for the weights.
        counts: of each download; they know when it has been told to stop.
    """

    def __init__(self, fake: Any) -> None:
        self.fake, self.go, self.upto = fake, threading.Event(), 50_000
        self.ranges: list[str | None] = []
        self.counts: list[hub_fetch._Count] = []
        self._file = fake._file
        fake._file = self.file

    def file(self, handler: Any, name: str) -> None:
        if handler.command == "GET" and name == "model.safetensors":
            self.ranges.append(handler.headers.get("Range"))
            if not self.go.is_set():
                self._in_two_parts(handler, self.fake.files[name])
                return
        self._file(handler, name)

    def _in_two_parts(self, handler: Any, content: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: self.upto])
        self.go.wait()
        handler.wfile.write(content[self.upto :])
        handler.close_connection = True
