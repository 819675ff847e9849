"""The line on top (which model, where) and the line above the prompt (what the engine does)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.sanitize import sanitize

if TYPE_CHECKING:
    from .host import EngineHost

_GLYPHS = {
    "loading": ("◌", "$text-warning"),
    "ready": ("○", "$foreground 55%"),
    "waiting": ("◌", "$text-warning"),
    "prefill": ("◐", "$text-warning"),
    "generating": ("●", "$text-success"),
    "stopping": ("◐", "$text-warning"),
    "failed": ("✖", "$text-error"),
}
_Part = tuple[str, str]  # text, style


@dataclass(frozen=True, slots=True)
class Status:
    """What the status line shows; None where there is nothing to show yet.

    Attributes:
        state: one of the keys above; `detail` says more of it.
        tokens, decode_tps, ttft_s: of the request in hand, or of the last one.
    """

    state: str = "loading"
    detail: str = ""
    tokens: int | None = None
    decode_tps: float | None = None
    ttft_s: float | None = None


class StatusLine(Widget):
    """One row; what does not fit is left out, the least important first."""

    status: reactive[Status] = reactive(Status())

    def render(self) -> Content:
        status = self.status
        groups = [_state(status), *_speed(status)]
        return _fit(groups, self.content_size.width)


class TitleBar(Widget):
    """One row: the program, the model, the conversation; how full its context is, where the engine runs."""

    model: reactive[str] = reactive("")
    chat: reactive[str] = reactive("")
    context: reactive[tuple[int, int] | None] = reactive(None)  # tokens in use, and the most there may be
    where: reactive[str] = reactive("")

    def show(self, host: EngineHost, chat: str, tokens: int) -> None:
        """`tokens` are those of the conversation, 0 where they are not known."""
        ready = host.client.ready
        place = [ready.backend, ready.info.device] if ready else []
        self.model, self.chat = host.model, chat
        self.where = " · ".join([*place, *(["offline"] if host.config.offline else [])])
        self.context = (tokens, ready.max_model_len) if ready and tokens else None

    def render(self) -> Content:
        name = Content.assemble((" ferrum ", "bold $text-accent"), (f" {sanitize(self.model)} ▾ ", "bold"))
        right = Content.assemble(self._fullness(), (f" {sanitize(self.where)} ", "$foreground 55%"))
        room = self.content_size.width - name.cell_length
        right = right.truncate(max(0, room), ellipsis=True)
        title = Content.styled(sanitize(self.chat), "$foreground 55%").truncate(
            max(0, room - right.cell_length - 2), ellipsis=True
        )
        gap = max(0, room - title.cell_length - right.cell_length)
        return Content.assemble(name, title, " " * gap, right)

    def _fullness(self) -> Content:
        if self.context is None:
            return Content("")
        used, most = self.context
        return Content.assemble(
            ("ctx ", "$foreground 55%"), f"{used:,}/{most:,}", (f" {used / most:.0%} ", "$foreground 55%")
        )

    async def on_click(self) -> None:
        await self.app.run_action("models")


def _state(status: Status) -> list[_Part]:
    glyph, style = _GLYPHS[status.state]
    if status.state == "loading" and status.detail:  # the stage says it all
        return [(glyph, style), (f" {sanitize(status.detail)}", "bold")]
    parts: list[_Part] = [(glyph, style), (f" {status.state}", "bold")]
    return [*parts, (f" {sanitize(status.detail)}", "$foreground 55%")] if status.detail else parts


def _speed(status: Status) -> list[list[_Part]]:
    groups: list[list[_Part]] = []
    if status.decode_tps is not None:
        groups.append([(f"{status.decode_tps:,.1f}", "bold $text-accent"), (" tok/s", "$foreground 55%")])
    if status.ttft_s is not None:
        groups.append([("TTFT ", "$foreground 55%"), (duration(status.ttft_s), "bold")])
    if status.tokens is not None:
        groups.append([(f"{status.tokens:,}", "bold"), (" tok", "$foreground 55%")])
    return groups


def describe(params: SamplingParams, system: str, thinking: bool | None, adapter: str = "") -> str:
    """The settings of the answers to come, in a line."""
    most = f"max {params.max_tokens:,}" if params.max_tokens else "no limit"
    top_p = f"top_p {params.top_p:g}" if params.top_p < 1 else ""
    parts = [f"adapter {adapter}" if adapter else "", f"temp {params.temperature:g}", top_p, most]
    parts.append("" if thinking is None else f"think {'on' if thinking else 'off'}")
    parts.append(f"sys: {system if len(system) <= 24 else system[:23] + '…'}" if system else "")
    return "  ".join(filter(None, parts))


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
