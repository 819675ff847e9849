"""Every error a user can cause or meet, as one tree.

A message is one line: what is wrong with the value in it, what is allowed, the next step.

FerrumError
├── UsageError                a flag, parameter or prompt that cannot be (exit 2)
│   ├── ContextLengthError    more tokens than the context, or than the KV pool, can hold
│   └── UnsupportedModelError a model or feature this backend cannot run exactly
├── ModelNotFoundError        no card, repository, folder or file of that name
├── ModelFileError            a file that is truncated, altered or not of its format
├── DownloadError             the network, or the disk, ended a download
│   └── DownloadStoppedError  the user did
├── BackendUnavailableError   the array library of a backend is absent or broken
├── SessionsBusyError         another process holds the sessions file
├── CapacityError             the KV pool has too few free blocks for a reservation
├── ContractError             a call the executor contract forbids: a fault of the caller
└── EngineDiedError           the engine's process or thread ended
"""

from __future__ import annotations

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A user's value for a message: its repr on one line, without the middle of what is long."""
    try:
        text = _SHORT.repr(value)
    except Exception:  # a whole number of thousands of digits, a class that cannot say what it is
        text = f"a value of type {type(value).__name__}"
    return cut(" ".join(text.splitlines()), 200)


def cut(text: str, most: int) -> str:
    """`text` in about that many characters; the middle is what goes."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def one_line(error: BaseException) -> str:
    """What an exception of a library says, for a message of ours."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:200]


class FerrumError(Exception):
    """Base of the tree.

    Args:
        what: what is wrong, with the offending value in it.
        allowed: what would have been right.
        next_step: what the user can do now.
    """

    exit_code = 1

    def __init__(self, what: str, allowed: str = "", next_step: str = "") -> None:
        self.what, self.allowed, self.next_step = what, allowed, next_step
        super().__init__(what, allowed, next_step)

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.allowed, self.next_step) if part)


class UsageError(FerrumError):
    exit_code = 2


class ContextLengthError(UsageError):
    pass


class UnsupportedModelError(UsageError):
    pass


class ModelNotFoundError(FerrumError):
    pass


class ModelFileError(FerrumError):
    pass


class DownloadError(FerrumError):
    pass


class DownloadStoppedError(DownloadError):
    pass


class BackendUnavailableError(FerrumError):
    pass


class SessionsBusyError(FerrumError):
    pass


class CapacityError(FerrumError):
    """The pool is short; carries the numbers, so that nobody parses them out of the message."""

    def __init__(self, needed_blocks: int, free_blocks: int) -> None:
        self.needed_blocks, self.free_blocks = needed_blocks, free_blocks
        super().__init__(
            f"the KV pool has {free_blocks} free blocks, {needed_blocks} are needed",
            next_step="retry when a request has finished, or raise --kv-memory",
        )

    def __reduce__(self) -> tuple[type[CapacityError], tuple[int, int]]:
        return type(self), (self.needed_blocks, self.free_blocks)


class ContractError(FerrumError):
    pass


class EngineDiedError(FerrumError):
    pass
