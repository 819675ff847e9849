"""What may follow in the prompt: commands behind a slash, files behind an at sign."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from ferrum_mlx.chat.commands import Completion
from ferrum_mlx.sanitize import sanitize

_ROWS, _ON_A_LOW_SCREEN = 6, 2
_LOW = 18  # rows of a screen


class Completions(Static):
    """A short list above the prompt; one row of it is marked. Nothing is shown while there is no choice."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._choices: Sequence[Completion] = ()
        self._marked = 0

    @property
    def marked(self) -> Completion | None:
        return self._choices[self._marked] if self._choices else None

    def offer(self, choices: Sequence[Completion]) -> None:
        self._choices, self._marked = choices, 0
        self._draw()

    def move(self, rows: int) -> None:
        self._marked = (self._marked + rows) % len(self._choices)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self.display = bool(self._choices)
        rows = _ROWS if self.app.size.height >= _LOW else _ON_A_LOW_SCREEN
        first = max(0, min(self._marked - rows // 2, len(self._choices) - rows))
        shown = self._choices[first : first + rows]
        width = max((len(choice.label) for choice in shown), default=0)
        lines: list[tuple[str, str] | str] = []
        for place, choice in enumerate(shown, first):
            mark, style = ("▸ ", "bold $text-accent") if place == self._marked else ("  ", "")
            lines += [
                (f"{mark}{sanitize(choice.label):<{width}}", style),
                (f"  {choice.help}\n", "$foreground 55%"),
            ]
        rest = len(self._choices) - len(shown)
        more = f"  {rest} more · " if rest else "  "
        lines.append((f"{more}Tab takes it · Esc closes", "$foreground 55%"))
        self.update(Content.assemble(*lines))
