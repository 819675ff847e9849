"""The chat screen: what is on it, its keys, and which engine, conversation and settings it has."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import Any, ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, TextArea

from ferrum_mlx.chat import commands
from ferrum_mlx.chat.attachments import attach
from ferrum_mlx.chat.conversation import Conversation
from ferrum_mlx.chat.sampling_choice import SamplingChoice
from ferrum_mlx.chat.settings import Settings
from ferrum_mlx.chat.store import Store
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.sanitize import sanitize

from . import dialogs, keys, sharing, slash
from .clipboard import copy
from .completions import Completions
from .desk import Desk
from .draft import DraftCount
from .engine.feed import EngineFeed
from .engine.panel import EnginePanel
from .engine.screen import EngineScreen
from .engine.strip import EngineStrip
from .host import EngineGone, EngineHost, EngineLoading, EngineNote, EngineReady, MakeClient
from .keeping import Keeping
from .key_row import KeyRow
from .message import MessageWidget
from .prompt import Prompt
from .screens.help import HelpScreen
from .status import TitleBar, describe
from .talk import Setup, Talk
from .theme import choose_theme

_DRAINS_PER_SECOND = 15
_DRAINS_PER_STATUS = 4
_SECOND_CTRL_C = 2.0  # seconds within which it quits


class ChatApp(App[None]):
    """One conversation with one engine, or two of them side by side.

    Args:
        system: the system message of new conversations.
        make_client: makes the client, given config, on_loading and on_died.
        thinking: the switch of some reasoning models' templates.
        adapter: the LoRA adapter that answers; "" is none.
        store: where conversations are kept; None keeps none.
        conversation: the one to open; None begins one.
        notes: what the user must be told that came up before the screen.
    """

    CSS_PATH: ClassVar[list[str | PurePath]] = [
        "ferrum.tcss",
        *(f"css/{part}.tcss" for part in ("transcript", "markdown", "engine", "screens")),
    ]
    TITLE = "ferrum"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-middle"), (100, "-wide")]  # noqa: RUF012 - declared so by Textual
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]  # noqa: RUF012
    BINDINGS = keys.BINDINGS

    def __init__(
        self,
        config: EngineConfig,
        choice: SamplingChoice,
        system: str = "",
        make_client: MakeClient = EngineClient.in_process,
        thinking: bool | None = None,
        *,
        adapter: str = "",
        store: Store | None = None,
        settings: Settings | None = None,
        conversation: Conversation | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.settings = settings or Settings()
        self.keeping = Keeping(self, store, self._note)
        self.system = system
        self._make_client = make_client
        self._notes = tuple(notes)
        self.host = self.new_host(config)
        self.feed = EngineFeed(self.host.client)
        book = self.keeping.book(conversation or Conversation(system=system))
        self.desk = Desk(self.host, book, Setup(choice, thinking, adapter))
        self.completions = Completions()
        self.prompt = Prompt(self.completions)
        self._draft = DraftCount(self.prompt, lambda: self.host.client, self.show_setup)
        self._title = TitleBar()
        self._drains = 0
        self._last_ctrl_c = 0.0
        self._could_stop = False  # as the row of keys has it

    def compose(self) -> ComposeResult:
        yield self._title
        with Horizontal(id="body"):
            yield self.desk
            yield EnginePanel(self.feed)
        yield EngineStrip(self.feed)
        yield self.completions
        yield self.prompt
        yield KeyRow()

    def on_mount(self) -> None:
        self._notes += choose_theme(self, self.settings.theme)
        keymap, notes = keys.usable(self.settings.keys)
        self._notes += tuple(notes)
        self.settings = replace(self.settings, keys=keymap)
        self.set_keymap(keymap)
        self.show_panel(self.settings.panel)
        self.prompt.focus()
        self._timer = self.set_interval(1 / _DRAINS_PER_SECOND, self._drain, pause=True)
        self.call_after_refresh(self._begin)  # what it mounts below needs its parents mounted

    async def _begin(self) -> None:
        await self.open(self.desk.talk.book.conversation)
        for note in self._notes:
            await self.desk.talk.note(note)
        self.host.start()

    async def on_unmount(self) -> None:
        for talk in self.desk.talks:
            talk.leave()
        for host in self.desk.hosts:
            await host.close()
        self.keeping.close()

    # Engines

    @on(EngineLoading)
    def _show_stage(self, message: EngineLoading) -> None:
        message.host.detail = message.stage
        self.desk.show_status()

    @on(EngineReady)
    async def _engine_ready(self, message: EngineReady) -> None:
        host = message.host
        death = host.client.death
        if death is not None:  # since it was ready; what came of it so far was taken for a failed build's
            await self._engine_gone(EngineGone(host, death, started=False))
            return
        host.came(message.ready)
        for talk in self.desk.of(host):
            await talk.engine_ready(message.ready.notes)
        if host is self.host:
            self.feed.attach(host.client)
        self.show_setup()
        self._timer.resume()

    @on(EngineNote)
    async def _engine_note(self, message: EngineNote) -> None:
        for talk in self.desk.of(message.host)[:1]:
            await talk.note(message.what)

    @on(EngineGone)
    async def _engine_gone(self, message: EngineGone) -> None:
        host = message.host
        if message.started and host.state != "ready":  # of a build that fails, the failure is told, too
            return
        if not message.started:
            host.state = "failed"
        for talk in self.desk.of(host):
            await talk.engine_gone(message.error, started=message.started)
        if message.started and host in self.desk.hosts:
            host.restart()
            self.desk.show_status()

    def new_host(self, config: EngineConfig, before: EngineConfig | None = None) -> EngineHost:
        return EngineHost(self, config, self._make_client, before)

    # Asking

    @on(Prompt.Sent)
    async def _send(self, message: Prompt.Sent) -> None:
        if not message.text:
            if self.host.state == "failed":
                self.host.restart()
                self.desk.show_status()
            return
        try:
            await self.send(message.text)
        except FerrumError as error:
            self.give_back(message.text)
            self.tell(str(error), bad=True)

    async def send(self, text: str) -> None:
        """Obey a command, or ask the model.

        Raises:
            FerrumError: neither can be done.
        """
        call = commands.parse(text)
        if call is not None:
            await slash.obey(self, call)
            return
        text = commands.as_text(text)
        if not await self.desk.ask(text, attach(text)):
            self.give_back(text)
        self.show_setup()

    @on(Prompt.Changed)
    def _drafted(self) -> None:
        self._draft.look()

    @on(Desk.Begun)
    def _begun(self) -> None:
        self._timer.resume()
        self.show_setup()

    async def _drain(self) -> None:
        self._drains += 1
        await self.desk.drain()
        if self._drains % _DRAINS_PER_STATUS:
            return
        self.desk.show_status()
        await self.feed.refresh()
        self.show_setup()
        if not self.desk.busy:
            self._timer.pause()

    # The conversation

    @property
    def store(self) -> Store | None:
        return self.keeping.store

    async def open(self, conversation: Conversation) -> None:
        """Put another conversation on screen; what is coming of the one before is kept as far as it is."""
        await self.end_comparison()
        await self.desk.talk.open(self.keeping.book(conversation))
        for message in self.desk.talk.path:
            if message.role == "user":
                self.prompt.remember(message.text)
        self.show_setup()

    async def end_comparison(self) -> None:
        await sharing.end(self)

    @on(Desk.Editing)
    def _editing(self) -> None:
        if self.desk.editing is not None:
            self.prompt.put(self.desk.editing.text)
            self.prompt.focus()
        self.show_setup()

    # What is told and shown

    @on(MessageWidget.Copy)
    async def _copy(self, message: MessageWidget.Copy) -> None:
        self.tell(await copy(self, message.text))

    @on(Talk.Returned)
    def _returned(self, message: Talk.Returned) -> None:
        self.give_back(message.text)

    @on(Talk.Told)
    def _told(self, message: Talk.Told) -> None:
        self.tell(message.what)

    def give_back(self, text: str) -> None:
        """Give a prompt back to the user, unless they have begun another; Up still has it then."""
        if not self.prompt.text:
            self.prompt.put(text)

    def tell(self, what: str, *, bad: bool = False) -> None:
        self.notify(what, severity="error" if bad else "information", markup=False)

    def notify(self, message: str, **options: Any) -> None:
        """Every widget's come this way, with names of files and words of libraries in them."""
        super().notify(sanitize(message), **options)

    def show_panel(self, shown: bool) -> None:
        """The engine beside the chat, if the screen is wide enough; else in two lines below it."""
        self.screen.set_class(shown, "-panel")

    def show_setup(self) -> None:
        """The title and the lines around the prompt."""
        talk = self.desk.talk
        if self._could_stop != self._can_stop:  # the row of keys is made anew, which is not cheap
            self._could_stop = self._can_stop
            self.refresh_bindings()
        self._title.show(self.host, talk.book.conversation.title, talk.tokens)
        title = "edit · Esc leaves it" if self.desk.editing else "prompt"
        counted = f" · {self._draft.said}" if self._draft.said else ""
        self.prompt.border_title = Content(sanitize(title + counted))
        described = describe(
            talk.params, talk.book.conversation.system, talk.setup.thinking, talk.setup.adapter
        )
        self.prompt.border_subtitle = Content(sanitize(described))

    def _note(self, what: str) -> None:
        self.call_later(self.desk.talk.note, what)

    # Actions

    @property
    def _can_stop(self) -> bool:
        return self.desk.answering or self.desk.editing is not None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What acts on the transcript is off under another screen, which has such keys of its own."""
        covered = len(self.screen_stack) > 1
        match action:
            case "stop":
                return self._can_stop
            case "to_prompt":
                return not (self._can_stop or covered or self.prompt.has_focus)
        return not (covered and action in keys.OF_TRANSCRIPT) and super().check_action(action, parameters)

    async def action_stop(self) -> None:
        if self.desk.answering:
            await self.desk.stop()
        elif self.desk.editing is not None:
            self.desk.cancel_edit()
            self.prompt.put("")
            self.show_setup()

    def action_to_prompt(self) -> None:
        self.prompt.focus()

    async def action_interrupt(self) -> None:
        boxes = (self.focused, self.prompt)  # one of another screen goes first
        in_a_box = (box.selected_text for box in boxes if isinstance(box, Input | TextArea))
        selected = self.screen.get_selected_text() or next(filter(None, in_a_box), "")
        now = time.monotonic()
        if selected:
            self.tell(await copy(self, selected))
        elif self.desk.answering:
            await self.action_stop()
        elif now - self._last_ctrl_c < _SECOND_CTRL_C:
            self.exit()
        else:
            self._last_ctrl_c = now
            self.tell("Ctrl+C again quits.")

    async def action_new_chat(self) -> None:
        await self.open(Conversation(system=self.system))

    async def action_regenerate(self) -> None:
        for talk in self.desk.talks:
            await self.desk.again(talk)

    async def action_help(self) -> None:
        await self.push_screen(HelpScreen(self.settings.keys))

    def ask_for(self, dialog: Coroutine[Any, Any, None]) -> None:
        """Run a screen that ends in an answer."""
        self.run_worker(dialog, group="dialog", exclusive=True)

    def action_models(self) -> None:
        self.ask_for(dialogs.pick_model(self))

    def action_sessions(self) -> None:
        self.ask_for(dialogs.pick_session(self))

    def action_settings(self) -> None:
        self.ask_for(dialogs.change_settings(self))

    async def action_engine(self) -> None:
        await self.push_screen(EngineScreen(self.feed))

    def action_scroll(self, pages: int) -> None:
        for talk in self.desk.talks:
            talk.transcript.scroll_pages(pages)

    def action_open_link(self, address: str) -> None:
        if address.startswith(("https://", "http://", "mailto:")):
            self.open_url(address)
        else:
            self.tell(f"{address} is not opened; allowed: https, http and mailto")

    def action_follow(self) -> None:
        for talk in self.desk.talks:
            talk.transcript.follow()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        yield SystemCommand("New chat", "Begin another conversation", self.action_new_chat)
        yield SystemCommand("Model", "Choose or download a model", self.action_models)
        yield SystemCommand("Sessions", "Find, rename, delete, export conversations", self.action_sessions)
        yield SystemCommand("Settings", "Sampling, system message, thinking", self.action_settings)
        yield SystemCommand("Engine", "KV map, queue, the last minute", self.action_engine)

    @on(Prompt.EndOfInput)
    def _quit_at_end_of_input(self) -> None:
        self.exit()
