"""What stands in the transcript and is no message: the empty state, errors, remarks."""

from __future__ import annotations

import asyncio

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.plain import size
from ferrum_mlx.sanitize import sanitize

from .screens import listing

_DIM = "$foreground 55%"
_KEYS = "^o other models · ^s earlier chats · / commands · @ files · F1 keys"


class Welcome(Static):
    """What an empty conversation shows; on a low screen, what matters most of it.

    Args:
        model: the one that is used.
        config: of its engine; offline nothing can be fetched, and so only models that are here are offered.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        super().__init__(markup=False)
        self._model, self._config = sanitize(model), config
        self._offers: list[Content] = []

    def on_mount(self) -> None:
        self.fit()
        self.run_worker(self._offer(), group="offers", exit_on_error=False)

    async def _offer(self) -> None:
        try:
            fit, backend = listing.for_engine(self._config)
            found = await asyncio.to_thread(listing.suggestions, fit, backend)
        except FerrumError as error:
            self._offers = [Content.styled(sanitize(f"no list of models: {error}"), "$text-warning")]
        else:
            offered = [each for each in found if each.here or not self._config.offline]
            self._offers = [_offer(each) for each in offered]
        self.fit()

    def fit(self) -> None:
        """Show the lines there is room for, the least important left out first."""
        model = Content.styled(self._model, "bold")
        if self._config.offline:
            model = Content.assemble(model, ("  offline", "$text-warning"))
        offers = self._offers
        if offers:
            offers = [Content(""), Content.styled("Models for this machine; Ctrl+O chooses", _DIM), *offers]
        tip = [Content(""), Content.styled("Type below and press Enter.", _DIM)]
        about = Content.styled("a local model, and an engine you can see", _DIM)
        name = [Content.styled("ferrum", "bold $text-accent"), about, Content("")]
        whole = [*name, model, *tip, Content.styled(_KEYS, _DIM), *offers]
        assert isinstance(self.parent, Widget)
        room = self.parent.scrollable_content_region.size
        width, height = room.width - self.gutter.width, room.height - self.gutter.height
        for lines in (
            whole,
            [*name, model, *tip, *offers],
            [model, *tip, *offers],
            [model, *offers],
            [model, *tip],
            [model],
        ):
            if len([row for line in lines for row in line.wrap(max(width, 1))]) <= height:
                break
        self.update(Content("\n").join(lines))


def _offer(entry: listing.Entry) -> Content:
    there = "here" if entry.here else f"↓ {size(entry.size) if entry.size else '?'}"
    known = listing.fit_cells(entry)[1][0] if entry.fit is not None else "memory unknown"
    room = "" if listing.fits(entry) else f"  {known}"
    return Content.assemble((sanitize(entry.name), "bold"), (f"  {there}", _DIM), (room, "$text-warning"))


class Failure(Static):
    """An error, inline: the cause and the next step; `way_back` is another one."""

    def __init__(self, error: FerrumError, way_back: str = "") -> None:
        cause = ": ".join(part for part in (sanitize(error.what), sanitize(error.allowed)) if part)
        lines = [("✖ ", "bold $text-error"), (cause, "")]
        steps = filter(None, (error.next_step, way_back))
        lines += [(f"\n→ {sanitize(step)}", _DIM) for step in steps]
        super().__init__(Content.assemble(*lines), classes="failure")


class Remark(Static):
    """A dim line of ours between messages."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(sanitize(text)), classes="remark")


class Unanswered(Remark):
    """Stands below a prompt at the end of a conversation, until something else does."""

    def __init__(self) -> None:
        super().__init__("This prompt has no answer yet: Ctrl+R answers it, another prompt goes beside it.")
