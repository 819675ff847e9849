"""The line on top (which model, where) and the line above the prompt (what the engine does)."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from ferrum_mlx.metrics import KVUsage, SpeculationStats
from ferrum_mlx.sanitize import sanitize

_GLYPHS = {
    "loading": ("◌", "$text-warning"),
    "ready": ("○", "$foreground 55%"),
    "waiting": ("◌", "$text-warning"),
    "prefill": ("◐", "$text-warning"),
    "generating": ("●", "$text-success"),
    "stopping": ("◐", "$text-warning"),
    "failed": ("✖", "$text-error"),
}
_KV_BAR = 16  # cells
_Part = tuple[str, str]  # text, style


@dataclass(frozen=True, slots=True)
class Status:
    """What the status line shows; None where there is nothing to show yet.

    Attributes:
        state: one of the keys above; `detail` says more of it.
        tokens, decode_tps, ttft_s: of the request in hand, or of the last one.
        speculation: of all requests; None where it is off.
    """

    state: str = "loading"
    detail: str = ""
    tokens: int | None = None
    decode_tps: float | None = None
    ttft_s: float | None = None
    kv: KVUsage | None = None
    speculation: SpeculationStats | None = None


class StatusLine(Widget):
    """One row; what does not fit is left out, the least important first."""

    status: reactive[Status] = reactive(Status())

    def render(self) -> Content:
        status = self.status
        groups = [_state(status), *_speed(status), *_guesses(status), *_kv(status)]
        return _fit(groups, self.content_size.width)

    def watch_status(self, status: Status) -> None:
        """Why nothing is guessed, for whoever points at the line."""
        why = status.speculation.why if status.speculation else ""
        self.tooltip = f"no guesses: {why}" if why else None


class TitleBar(Widget):
    """One row: the program, the model, the backend and device, whether it is offline."""

    model: reactive[str] = reactive("")
    where: reactive[str] = reactive("")

    def render(self) -> Content:
        left = Content.assemble((" ferrum ", "bold $accent"), (f" {sanitize(self.model)} ", "bold"))
        right = Content.styled(f"{sanitize(self.where)} ", "$foreground 55%")
        gap = self.content_size.width - left.cell_length - right.cell_length
        return Content.assemble(left, " " * gap, right) if gap > 0 else left


def _state(status: Status) -> list[_Part]:
    glyph, style = _GLYPHS[status.state]
    if status.state == "loading" and status.detail:  # the stage says it all
        return [(glyph, style), (f" {sanitize(status.detail)}", "bold")]
    parts: list[_Part] = [(glyph, style), (f" {status.state}", "bold")]
    return [*parts, (f" {sanitize(status.detail)}", "$foreground 55%")] if status.detail else parts


def _speed(status: Status) -> list[list[_Part]]:
    groups: list[list[_Part]] = []
    if status.decode_tps is not None:
        groups.append([(f"{status.decode_tps:,.1f}", "bold $accent"), (" tok/s", "$foreground 55%")])
    if status.ttft_s is not None:
        groups.append([("TTFT ", "$foreground 55%"), (duration(status.ttft_s), "bold")])
    if status.tokens is not None:
        groups.append([(f"{status.tokens:,}", "bold"), (" tok", "$foreground 55%")])
    return groups


def _guesses(status: Status) -> list[list[_Part]]:
    """How many of the guesses were right, and how many tokens a verify brought."""
    stats = status.speculation
    if stats is None or not stats.verifies:
        return []
    right, length = f"{stats.acceptance_rate:.0%}", f" ×{stats.mean_acceptance_length:.1f}"
    return [[("spec ", "$foreground 55%"), (right, "bold"), (length, "$foreground 55%")]]


def _kv(status: Status) -> list[list[_Part]]:
    kv = status.kv
    if kv is None or not kv.total_blocks:
        return []
    share = kv.used_blocks / kv.total_blocks
    full = min(_KV_BAR, -int(-share * _KV_BAR // 1))  # rounded up: one block in use is seen
    counts: list[_Part] = [
        ("KV ", "$foreground 55%"),
        (f"{kv.used_blocks:,}", "bold"),
        (f"/{kv.total_blocks:,} blk", "$foreground 55%"),
    ]
    return [counts, [("█" * full, "$accent"), ("·" * (_KV_BAR - full), "$foreground 55%")]]


def duration(seconds: float) -> str:
    """A time in the unit people read best."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _fit(groups: list[list[_Part]], width: int) -> Content:
    """As many of the groups, from the first, as the width holds."""
    line = Content.assemble(" ", *groups[0])
    for group in groups[1:]:
        longer = Content.assemble(line, "   ", *group)
        if longer.cell_length > width:
            break
        line = longer
    return line
