"""Ctrl+O: choose a model, fetch it if it is not here."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, ProgressBar, Static
from textual.widgets.option_list import Option

from ferrum_mlx import hub
from ferrum_mlx.errors import DownloadStoppedError, FerrumError, shown
from ferrum_mlx.plain import size
from ferrum_mlx.sanitize import sanitize

from ..key_row import KeyRow
from . import listing
from .confirm import Confirm
from .download import Download
from .finder import SearchBox, countdown, table

_LOOKS_PER_SECOND = 5  # at a download


class ModelPicker(ModalScreen[str | None]):
    """Dismissed with the name of a model that is on this machine, or None.

    Args:
        current: the chat's model, as its name stands in the list.
        offline: what is not on this machine cannot be chosen.
        fit: whether a model's weights and KV fit into memory.
        backend: mlx or torch, whose files are meant; "" is for any.
        fetch: the name of a model whose download begins at once.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Close", id="models.close"),
        Binding("c", "cancel", "Cancel download", id="models.cancel"),
        Binding("slash", "filter", "Filter or path", id="models.filter"),
        Binding("d", "delete", "Delete", id="models.delete"),
    ]

    def __init__(
        self,
        current: str = "",
        offline: bool = False,
        fit: listing.FitOf | None = None,
        *,
        backend: str = "",
        fetch: str = "",
    ) -> None:
        super().__init__()
        self._current, self._offline, self._fit = current, offline, fit
        self._backend, self._fetch = backend, fetch
        self._entries: list[listing.Entry] | None = None  # None until they are read
        self._shown: list[str] = []  # names, in the order of the rows
        self._download: Download | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="models", classes="picker") as box:
            box.border_title = "models"
            yield SearchBox("filter; or owner/name, a folder, a .gguf file", self._fetch)
            yield Static(classes="headings")
            yield OptionList(compact=True, markup=False)
            with Vertical(id="download"):
                yield Static(id="download-what")
                yield ProgressBar(show_percentage=True, show_eta=False)
                yield Static(id="download-numbers")
            yield Static(classes="detail", markup=False)
            yield Static("looking for models …", classes="note", markup=False)
        yield KeyRow(show_command_palette=False)

    def on_mount(self) -> None:
        self._timer = self.set_interval(1 / _LOOKS_PER_SECOND, self._look, pause=True)
        self.query_one(OptionList).focus()
        self._read()

    def _on_prune(self) -> None:
        self.workers.cancel_node(self)  # Textual does so when the widgets they write to are gone already

    def on_unmount(self) -> None:
        if self._download is not None:
            self._download.stop()

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "cancel":
            return self._download is not None
        if action == "delete":
            return self._download is None and isinstance(self.focused, OptionList)
        return True

    def on_descendant_focus(self) -> None:
        self.refresh_bindings()

    # The list

    @work(exclusive=True, group="list")
    async def _read(self) -> None:
        try:
            found = await asyncio.to_thread(listing.entries, self._fit, self._backend)
        except FerrumError as error:
            self._say(str(error), "error")
        else:
            self._show(found)

    def _show(self, found: list[listing.Entry]) -> None:
        first = self._entries is None
        self._entries = found
        self._fill(self._fetch or self._current)
        if first:
            self._say("")
        if first and self._fetch:
            self._take(self._fetch)

    def _fill(self, highlight: str = "") -> None:
        """Put the rows that the filter lets through on the screen, in columns of its width."""
        if self._entries is None:
            return
        rows = self.query_one(OptionList)
        typed = self.query_one(SearchBox).value.strip()
        found = [each for each in self._entries if _matches(each, typed)]
        width = max(rows.scrollable_content_region.width, 10)
        cells = [listing.cells(each, each.name == self._current) for each in found]
        head = [(text, "$foreground 55%") for text in listing.HEADINGS]
        heading, *lines = table([head, *cells], width, elastic=listing.NAME, drop=listing.DROP)
        names = [each.name for each in found]
        if (_is_a_name(typed) or typed == self._fetch != "") and typed not in names:
            at = 0 if _is_a_path(typed) else len(names)
            names.insert(at, typed)
            lines.insert(at, Content.assemble(("→ use ", "$text-accent"), sanitize(typed)))
        before = highlight or self._highlighted()
        self._shown = names
        self.query_one(".headings", Static).update(heading)
        rows.set_options(Option(line) for line in lines)
        rows.highlighted = names.index(before) if before in names else 0 if names else None
        if not names:
            self._say(f"no model has {shown(typed)} in its name; type owner/name, a folder or a .gguf file")

    def _highlighted(self) -> str:
        at = self.query_one(OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else ""

    @on(OptionList.OptionHighlighted)
    def _detail(self) -> None:
        name = self._highlighted()
        each = next((each for each in self._entries or () if each.name == name), None)
        self.query_one(".detail", Static).update(Content(sanitize(listing.detail(each) if each else "")))

    @on(Input.Changed)
    def _filter(self) -> None:
        self._say("")
        self._fill()

    @on(Input.Submitted)
    def _enter_in_the_box(self) -> None:
        if name := self._highlighted():
            self._take(name)

    @on(OptionList.OptionSelected)
    def _enter_on_a_row(self, event: OptionList.OptionSelected) -> None:
        self._take(self._shown[event.option_index])

    # A choice

    def _take(self, name: str) -> None:
        if self._download is None:
            self._say(f"looking for {name} …")
            self._find(name)

    @work(exclusive=True, group="choice")
    async def _find(self, name: str) -> None:
        try:
            status = await asyncio.to_thread(hub.info, name, self._backend)
        except FerrumError as error:
            self._say(str(error), "error")
        else:
            self._found(status)

    def _found(self, status: hub.ModelStatus) -> None:
        if status.path is not None:
            self.dismiss(status.name)
        elif self._offline:
            self._say(
                f"{status.name} is not on this machine, and --offline forbids fetching it; "
                "choose another, or start without --offline",
                "error",
            )
        else:
            self._begin(status.name)

    # A download

    def _begin(self, name: str) -> None:
        self._say("")
        self._download = Download(name, backend=self._backend)
        self._download.start()
        self.query_one("#download").display = True
        self.query_one(OptionList).focus()
        self._timer.resume()
        self._look()
        self.refresh_bindings()

    def _look(self) -> None:
        download = self._download
        if download is None:
            return
        if download.ended.is_set():
            self._end(download)
            return
        self.query_one("#download-what", Static).update(Content(sanitize(download.said or download.model)))
        self.query_one(ProgressBar).update(total=download.total or None, progress=download.done)
        self.query_one("#download-numbers", Static).update(Content(_numbers(download)))

    def _end(self, download: Download) -> None:
        self._timer.pause()
        self._download = None
        self.query_one("#download").display = False
        self.refresh_bindings()
        if download.error is None:
            self.dismiss(download.model)
            return
        if isinstance(download.error, DownloadStoppedError):
            self._say(_stopped(download.model))
        else:
            self._say(f"{download.error}; Enter tries again", "error")
        self._read()

    def action_cancel(self) -> None:
        if self._download is not None:
            self._download.stop()
            self._look()

    async def action_back(self) -> None:
        """The first Esc ends a download; the second does not wait for it."""
        if self._download is not None and not self._download.stopping:
            self.action_cancel()
        else:
            self.dismiss(None)

    # The rest

    def action_filter(self) -> None:
        self.query_one(SearchBox).focus()

    @work(exclusive=True, group="delete")
    async def action_delete(self) -> None:
        name = self._highlighted()
        each = next((each for each in self._entries or () if each.name == name), None)
        if each is None:
            return
        if not each.here and not each.partial:
            self._say(f"there is nothing of {name} on this machine to delete")
            return
        freed = size((each.size or 0) if each.here else each.partial)
        own = " It is the model of this chat." if name == self._current else ""
        if await self.app.push_screen_wait(Confirm(f"Delete {name}? {freed} become free.{own}", "Delete")):
            await self._remove(name)

    async def _remove(self, name: str) -> None:
        self._say(f"deleting {name} …")
        try:
            freed = await asyncio.to_thread(hub.remove, name)
        except FerrumError as error:
            self._say(str(error), "error")
        else:
            self._say(f"{name} is deleted, {size(freed)} are free again")
        self._read()

    def _say(self, what: str, kind: str = "") -> None:
        note = self.query_one(".note", Static)
        note.update(Content(sanitize(what)))
        note.set_class(kind == "error", "-error")


def _matches(entry: listing.Entry, typed: str) -> bool:
    text = f"{entry.name} {entry.title} {entry.licence}".casefold()
    return all(word in text for word in typed.casefold().split())


def _is_a_path(typed: str) -> bool:
    return typed.startswith((".", "/", "~")) or typed.endswith(".gguf")


def _is_a_name(typed: str) -> bool:
    return _is_a_path(typed) or "/" in typed


def _numbers(download: Download) -> str:
    if download.stopping:
        return "stopping …"
    if not download.total:
        return "asking the source …  Esc cancels"
    if download.done >= download.total:
        return f"{size(download.total)} are here; checking them"
    parts = [f"{size(download.done)} of {size(download.total)}"]
    if download.rate is not None:
        parts.append(f"{size(int(download.rate))}/s")
    if download.rest_s is not None:
        parts.append(f"{countdown(download.rest_s)} left")
    return "  ".join([*parts, "Esc cancels"])


def _stopped(name: str) -> str:
    kept = hub.partial_size(name)
    after = f"{size(kept)} are kept; choose it again to go on" if kept else "nothing of it is kept"
    return f"the download of {name} is stopped; {after}"
