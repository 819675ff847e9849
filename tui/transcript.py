"""The conversation as it stands on screen: its last messages, and earlier ones as the user scrolls up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from textual import on
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.widget import Widget

from ferrum_mlx.chat.conversation import Message
from ferrum_mlx.config import EngineConfig

from .answer import Answer
from .message import MessageWidget, Place, UserMessage
from .notices import Remark, Unanswered, Welcome
from .once import LaidOutOnce

_MOUNTED = 20  # messages; each is several widgets, and a layout visits them all
_SLACK = 4  # messages more than that before the first ones go
PlaceOf = Callable[[Message], Place]


class Transcript(LaidOutOnce, VerticalScroll, can_focus=False):
    """Follows its end until the user scrolls up; at the end it follows again."""

    def __init__(self) -> None:
        super().__init__()
        self.border_title = "chat"
        self._path: list[Message] = []  # those on screen are its end
        self._place: PlaceOf = lambda message: (1, 1)
        self._earlier = 0  # messages of the path that are not mounted
        self._left_at: int | None = None  # lines there were when the user scrolled up
        self._lost_focus: int | None = None  # place in the path of a message that had it and went
        self._changing = asyncio.Lock()  # what is mounted, which takes several steps
        self._fetching = False

    def on_resize(self) -> None:
        for welcome in self.query(Welcome):
            welcome.fit()
        self._anchor_what_is_long()
        self.call_after_refresh(self._want_earlier)

    @property
    def _messages(self) -> list[MessageWidget]:
        return [child for child in self.children if isinstance(child, MessageWidget)]

    # What is in it

    async def add(self, widget: Widget) -> None:
        """Mount a message, or a notice, below the others."""
        async with self._changing:
            await self._add(widget)

    async def _add(self, widget: Widget) -> None:
        if not isinstance(widget, Remark):  # what is only noted leaves the empty state as it is
            await self.query(Welcome).remove()
        await self.mount(widget)
        if isinstance(widget, MessageWidget):
            await self.query(Unanswered).remove()
            self._path.append(widget.message)
            if self._lost_focus == len(self._path) - 1:
                self.screen.set_focus(widget, scroll_visible=False)
            self._lost_focus = None
        await self._drop_surplus()

    async def show(self, path: Sequence[Message], place: PlaceOf) -> None:
        """These messages instead of what is there; what is the same stays."""
        async with self._changing:
            with self.app.batch_update():
                focused = await self._show(path, place)
        self.call_after_refresh(self._want_earlier)
        if focused is None:
            self.follow()
        else:
            self.call_after_refresh(self._look_at, focused)

    async def _show(self, path: Sequence[Message], place: PlaceOf) -> MessageWidget | None:
        """Returns the message that has taken the focus over from the one that was in its place."""
        self._lost_focus = self._focused_place()
        kept = self._same_start(path)
        stale = list(self.children)[self.children.index(kept[-1]) + 1 if kept else 0 :]
        if not kept:
            self._earlier = max(0, len(path) - _MOUNTED)
        self._path, self._place = list(path), place
        for widget in kept:
            widget.set_place(place(widget.message))
        fresh = await self._mount(path[self._earlier + len(kept) :], after=len(self.children))
        focused = None
        if self._lost_focus is not None and self._lost_focus < len(path):
            at = self._lost_focus - self._earlier - len(kept)
            if 0 <= at < len(fresh):
                focused = fresh[at]
                self.release_anchor()
                self.screen.set_focus(focused, scroll_visible=False)
            self._lost_focus = None
        await self.remove_children(stale)
        return focused

    def _same_start(self, path: Sequence[Message]) -> list[MessageWidget]:
        """The widgets on screen whose messages stay; none where a great many would come below them."""
        same = 0
        for before, after in zip(self._path, path, strict=False):
            if before is not after:
                break
            same += 1
        return self._messages[: max(same - self._earlier, 0)] if len(path) - same <= _MOUNTED else []

    def _focused_place(self) -> int | None:
        for at, widget in enumerate(self._messages):
            if widget.has_focus_within:
                return self._earlier + at
        return None

    async def _mount(self, messages: Sequence[Message], *, after: int) -> list[MessageWidget]:
        """Mount messages behind so many children, whole."""
        widgets = [_widget(message, self._place) for message in messages]
        if after < len(self.children):
            await self.mount(*widgets, before=after)
        else:
            await self.mount(*widgets)
        for widget in widgets:
            if isinstance(widget, Answer):
                await (await widget.fill()).finish()
        return widgets

    async def clear(self, model: str, config: EngineConfig) -> None:
        """Back to an empty conversation."""
        async with self._changing:
            self._path, self._earlier, self._left_at = [], 0, None
            await self.remove_children()
            await self.mount(Welcome(model, config))
        self.follow()

    async def _drop_surplus(self) -> None:
        """Unmount the first messages, where nobody looks: below stay two screens at least."""
        messages = self._messages
        if self._left_at is not None or len(messages) <= _MOUNTED + _SLACK:
            return
        first, last = messages[-_MOUNTED], messages[-1]
        if last.virtual_region.bottom - first.virtual_region.y < 2 * self.size.height:
            return
        gone = list(self.children)[: self.children.index(first)]
        if not any(widget.has_focus_within for widget in gone):
            self._earlier += len(messages) - _MOUNTED
            await self.remove_children(gone)

    # Earlier messages

    def _want_earlier(self) -> None:
        """Bring some where the user has come to the first, or where there is room for more."""
        at_top = self.scroll_y <= 0 and (self._left_at is not None or self.max_scroll_y == 0)
        if at_top and self._earlier and not self._fetching:
            self._fetching = True
            self.call_later(self._fetch)

    async def _fetch(self) -> None:
        """Mount messages before the first; what the user sees stays where it is."""
        async with self._changing:
            messages = self._path[max(0, self._earlier - _MOUNTED) : self._earlier]
            if messages:
                top = self.children[0]
                was = top.virtual_region.y
                with self.app.batch_update():
                    await self._mount(messages, after=0)
                self._earlier -= len(messages)
                self.call_after_refresh(self._settle, top, was)
            else:
                self._fetching = False

    def _settle(self, top: Widget, was: int) -> None:
        if top.is_attached and self._left_at is not None:
            more = top.virtual_region.y - was
            self._left_at += more
            self.scroll_to(y=self.scroll_y + more, animate=False, force=True, immediate=True)
        self.call_after_refresh(self._settled)

    def _settled(self) -> None:
        """Only now is the place true again: before, it would look as if the user were at the first."""
        self._fetching = False
        if self.max_scroll_y == 0:  # still room
            self._want_earlier()

    @on(MessageWidget.Go)
    async def _go(self, event: MessageWidget.Go) -> None:
        event.stop()
        messages = self._messages
        if event.widget not in messages:
            return
        at = messages.index(event.widget) + event.step
        if at < 0 and self._earlier and not self._fetching:
            self._fetching = True
            await self._fetch()
            messages = self._messages
            at = messages.index(event.widget) + event.step
        if 0 <= at < len(messages):
            messages[at].focus()

    # Scrolling

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._left_at = None
        self.scroll_end(animate=False)
        self._tell()

    def _look_at(self, widget: MessageWidget) -> None:
        if widget.is_attached:
            self.scroll_to_widget(widget, animate=False, immediate=True)
        self._left_at = None if self.is_vertical_scroll_end else self.virtual_size.height
        self._tell()

    def scroll_pages(self, pages: int) -> None:
        if pages < 0:
            self.scroll_page_up(animate=False)
            self._want_earlier()
        else:
            self.scroll_page_down(animate=False)

    def on_mouse_scroll_up(self) -> None:
        self._want_earlier()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self.is_vertical_scroll_end:
            self._left_at = None
        elif new_value < old_value and self._left_at is None:
            self._left_at = self.virtual_size.height
        self._want_earlier()
        self._tell()

    def watch_virtual_size(self, before: Size, now: Size) -> None:
        self._anchor_what_is_long()
        if self._left_at is None:
            self.call_after_refresh(self._stay_at_end)
        elif before.width != now.width:
            self._left_at += now.height - before.height  # wrapped anew, which is no news
        self._want_earlier()
        self._tell()

    def _anchor_what_is_long(self) -> None:
        """Textual's anchor would put what is shorter than the screen at the bottom of it."""
        long = self.max_scroll_y > 0
        if not long:
            self._left_at = None
        if long != self.is_anchored:
            self.anchor(long)
        if not long:
            self.scroll_to(y=0, animate=False, force=True, immediate=True, release_anchor=False)

    def _stay_at_end(self) -> None:
        """Textual takes any scroll for a leaving, one that moves nothing, as PgDn at the end, too."""
        on_the_way_up = self.scroll_target_y < self.scroll_y
        at_end = self.max_scroll_y == 0 or self.is_vertical_scroll_end
        if self._left_at is None and not (on_the_way_up or at_end):
            self.scroll_end(animate=False, immediate=True)

    def _tell(self) -> None:
        """How much has come below what the user looks at."""
        new = 0 if self._left_at is None else self.virtual_size.height - self._left_at
        text = f"↓ {new} new line{'s' * (new != 1)} · End follows" if new > 0 else ""
        if self._left_at is not None and new <= 0:
            text = "End follows"
        if text != self.border_subtitle:
            self.border_subtitle = text


def _widget(message: Message, place: PlaceOf) -> MessageWidget:
    kind = UserMessage if message.role == "user" else Answer
    return kind(message, place(message))
