"""Text that a model or a user wrote, made safe to put on a terminal."""

from __future__ import annotations

_KEPT = "\n\t"
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}


def sanitize(text: str) -> str:
    """Without C0 and C1 control codes and DEL, newline and tab excepted.

    Works on any part of a text, so a stream may be cut anywhere.
    """
    return text.translate(_CONTROLS)
