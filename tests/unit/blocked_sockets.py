"""An environment in which no process reaches a network, and each that tries is noted."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Run by every interpreter that finds it, those of child processes too.
_SITE = """
import os, socket, sys
with open(os.environ["NETWORK_LOG"] + ".watched", "a") as log:
    print(sys.orig_argv, file=log)
def refuse(event, args):
    used = event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind")
    internet = event == "socket.__new__" and args[1] in (socket.AF_INET, socket.AF_INET6)
    if internet or (used and not isinstance(args[-1], (str, bytes))):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            print(event, sys.orig_argv, file=log)
        raise OSError("no network here")
sys.addaudithook(refuse)
"""


@dataclass(frozen=True)
class Blocked:
    """`env` is to be added to a process's environment."""

    env: dict[str, str]
    log: Path

    @property
    def tried(self) -> str:
        """The calls that were refused; "" is none."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def watched(self) -> list[str]:
        """The command line of every process that had the hook."""
        return Path(f"{self.log}.watched").read_text().splitlines()


def block_sockets(folder: Path) -> Blocked:
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    log = folder / "network.log"
    return Blocked({"PYTHONPATH": path, "NETWORK_LOG": str(log)}, log)
