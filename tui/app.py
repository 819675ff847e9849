"""The chat screen. Its engine is a child process that is started after the first paint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Footer

from ferrum_mlx.catalog import default_card
from ferrum_mlx.client import EngineClient
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.messages import ChatMessage, ChatOptions, Ready
from ferrum_mlx.sampling import SamplingParams

from .help import HelpScreen
from .prompt import Prompt
from .status import Status, StatusLine, TitleBar
from .theme import FERRUM
from .transcript import Answer, Failure, Remark, Transcript, UserMessage, Welcome
from .turn import Turn

_DRAINS_PER_SECOND = 15
_DRAINS_PER_STATUS = 4
_OF_TRANSCRIPT = ("new_chat", "scroll", "follow")  # actions
_SECOND_CTRL_C = 2.0  # seconds within which it quits

MakeClient = Callable[[EngineConfig, Callable[[str], None], Callable[[FerrumError], None]], EngineClient]


class EngineLoading(Message):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage


class EngineReady(Message):
    def __init__(self, ready: Ready) -> None:
        super().__init__()
        self.ready = ready


class EngineNote(Message):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what


class EngineGone(Message):
    """The engine died, or could not be started (`started` is False)."""

    def __init__(self, error: FerrumError, started: bool) -> None:
        super().__init__()
        self.error, self.started = error, started


class ChatApp(App[None]):
    """One conversation with one engine.

    Args:
        make_client: makes the client, given config, on_loading and on_died.
        thinking: the switch of some reasoning models' templates.
    """

    CSS_PATH = "ferrum.tcss"
    TITLE = "ferrum"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop", id="chat.stop"),
        Binding("ctrl+c", "interrupt", "Copy, stop or quit", show=False, priority=True, id="chat.interrupt"),
        Binding("ctrl+n", "new_chat", "New chat", priority=True, id="chat.new"),
        Binding("pageup", "scroll(-1)", "Scroll up", show=False, priority=True, id="chat.up"),
        Binding("pagedown", "scroll(1)", "Scroll down", show=False, priority=True, id="chat.down"),
        Binding("ctrl+end", "follow", "Follow", show=False, priority=True, id="chat.follow"),
        Binding("f1", "help", "Help", id="chat.help"),
    ]

    def __init__(
        self,
        config: EngineConfig,
        params: SamplingParams,
        system: str = "",
        make_client: MakeClient = EngineClient.in_process,
        thinking: bool | None = None,
    ) -> None:
        super().__init__()
        self._config, self._params = config, params
        self._chat = ChatOptions(thinking=thinking)
        self._opening: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        self._history = self._opening.copy()
        self._model = Path(config.model).name or default_card().alias
        self._title, self._transcript = TitleBar(), Transcript()
        self._status, self._prompt = StatusLine(), Prompt()
        self._client = make_client(config, self._post_loading, self._post_died)
        self._client.on_note = self._post_note
        self._engine = "loading"  # or "ready", "failed"
        self._turn: Turn | None = None
        self._told: FerrumError | None = None  # the last error of a turn: an engine's death is told once
        self._drains = 0
        self._last_ctrl_c = 0.0

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._transcript
        yield self._status
        yield self._prompt
        yield Footer()

    async def on_mount(self) -> None:
        self.register_theme(FERRUM)
        self.theme = FERRUM.name
        self._title.model = self._model
        self._title.where = "offline" if self._config.offline else ""
        self._prompt.focus()
        await self._transcript.mount(Welcome(self._model))
        self._timer = self.set_interval(1 / _DRAINS_PER_SECOND, self._drain, pause=True)
        self.call_after_refresh(self._start_engine)

    async def on_unmount(self) -> None:
        await asyncio.to_thread(self._client.close)  # ends the start that a worker may wait for, too

    # The engine

    def _post_loading(self, stage: str) -> None:
        self.post_message(EngineLoading(stage))

    def _post_note(self, what: str) -> None:
        self.post_message(EngineNote(what))

    def _post_died(self, error: FerrumError) -> None:
        self.post_message(EngineGone(error, started=True))

    @work(thread=True, exclusive=True, group="engine")
    def _start_engine(self, again: bool = False) -> None:
        try:
            ready = self._client.restart() if again else self._client.start()
        except FerrumError as error:
            self.post_message(EngineGone(error, started=False))
        else:
            self.post_message(EngineReady(ready))

    def _restart_engine(self) -> None:
        self._engine = "loading"
        self._show(Status("loading", "starting a new engine"))
        self._start_engine(again=True)

    @on(EngineLoading)
    def _show_stage(self, message: EngineLoading) -> None:
        self._show(Status("loading", message.stage))

    @on(EngineReady)
    async def _engine_ready(self, message: EngineReady) -> None:
        death = self._client.death
        if death is not None:  # since it was ready; what came of it so far was taken for a failed build's
            await self._engine_gone(EngineGone(death, started=False))
            return
        ready = message.ready
        self._engine = "ready"
        self._model = Path(ready.info.model_id).name  # of a file or a repository, what tells it apart
        self._title.model = self._model
        offline = " · offline" if self._config.offline else ""
        self._title.where = f"{ready.backend} · {ready.info.device}{offline}"
        self._show(Status("ready", kv=ready.kv))
        if self._transcript.query(Welcome):
            await self._transcript.clear(self._model)
        for note in ready.notes:
            await self._add_note(EngineNote(note))
        self._submit()

    @on(EngineNote)
    async def _add_note(self, message: EngineNote) -> None:
        await self._transcript.add(Remark(f"note: {message.what}"))

    @on(EngineGone)
    async def _engine_gone(self, message: EngineGone) -> None:
        if message.started and self._engine == "ready":
            await self._drain()
            if message.error is not self._told:
                await self._transcript.add(Failure(message.error))
            self._restart_engine()
        elif not message.started:
            self._engine = "failed"
            self._show(Status("failed", "Enter tries again"))
            if self._turn is None:
                await self._transcript.add(Failure(message.error))
            else:
                self._turn.error = message.error
                await self._end_turn(self._turn)

    # A turn

    @on(Prompt.Sent)
    async def _send(self, message: Prompt.Sent) -> None:
        commands = {"/new": self.action_new_chat, "/help": self.action_help, "/quit": self.action_quit}
        command = message.text.strip()
        if command in commands:
            await commands[command]()
        elif not command:
            if self._engine == "failed":
                self._restart_engine()
        elif self._turn is not None:
            self._restore(message.text)
            self.notify("An answer is still coming; Esc stops it.")
        else:
            await self._begin_turn(message.text)

    async def _begin_turn(self, text: str) -> None:
        turn = Turn(text, UserMessage(text), Answer(self._model))
        self._turn = turn
        await self._transcript.add(turn.asked)
        await self._transcript.add(turn.answer)
        self._transcript.follow()
        if self._engine == "failed":
            self._restart_engine()
        self._submit()

    def _submit(self) -> None:
        """Hand the turn to the engine, if there are both."""
        turn = self._turn
        if turn is None or turn.stream is not None:
            return
        if self._engine == "ready":
            messages = [*self._history, {"role": "user", "content": turn.prompt}]
            turn.sent(self._client.submit(messages, self._params, chat=self._chat))
            self._timer.resume()
            self._show(turn.status())
        else:
            self._show_idle()

    async def _drain(self) -> None:
        turn = self._turn
        if turn is None:
            self._settle()
            return
        new = turn.drain()
        if new.thinking:
            turn.answer.think(new.thinking)
        if new.text:
            await turn.answer.add(new.text)
        if turn.ended:
            await self._end_turn(turn)
            return
        self._drains += 1
        if self._drains % _DRAINS_PER_STATUS == 0:
            self._show(turn.status())

    def _settle(self) -> None:
        """Without a turn: follow the count of KV blocks until those of the last one are free."""
        self._show(self._status.status)
        step = self._client.last_step
        if self._client.ready is None or step is None or not (step.running or step.waiting):
            self._timer.pause()

    async def _end_turn(self, turn: Turn) -> None:
        self._turn = None
        if turn.error is None:
            await turn.answer.finish(turn.summary())
            self._history += [
                {"role": "user", "content": turn.prompt},
                {"role": "assistant", "content": turn.text},
            ]
            self._show(turn.status())
            return
        self._restore(turn.prompt)
        if turn.text:
            await turn.answer.finish("■ broken off")
        else:
            await turn.answer.remove()
        await self._transcript.add(Failure(turn.error))
        self._told = turn.error
        self._show_idle()

    def _restore(self, text: str) -> None:
        """Give a prompt back to the user, unless they have begun another; Up still has it then."""
        if not self._prompt.text:
            self._prompt.put(text)

    # Actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What acts on the transcript is off under another screen, which has such keys of its own."""
        covered = len(self.screen_stack) > 1
        return not (covered and action in _OF_TRANSCRIPT) and super().check_action(action, parameters)

    async def action_stop(self) -> None:
        turn = self._turn
        if turn is None:
            return
        if turn.tokens and turn.stream is not None:
            turn.stopping = True
            turn.stream.abort()
            self._show(turn.status())
            return
        if turn.stream is not None:
            turn.stream.close()
        self._turn = None
        await turn.asked.remove()
        await turn.answer.remove()
        self._restore(turn.prompt)
        self._show_idle()

    async def action_interrupt(self) -> None:
        selected = self.screen.get_selected_text() or self._prompt.selected_text
        now = time.monotonic()
        if selected:
            self.copy_to_clipboard(selected)
            self.notify("Copied.")
        elif self._turn is not None:
            await self.action_stop()
        elif now - self._last_ctrl_c < _SECOND_CTRL_C:
            self.exit()
        else:
            self._last_ctrl_c = now
            self.notify("Ctrl+C again quits.")

    async def action_new_chat(self) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            if turn.stream is not None:
                turn.stream.close()
        self._history = self._opening.copy()
        await self._transcript.clear(self._model)
        self._show_idle()

    async def action_help(self) -> None:
        await self.push_screen(HelpScreen())

    def action_scroll(self, pages: int) -> None:
        if pages < 0:
            self._transcript.scroll_page_up(animate=False)
        else:
            self._transcript.scroll_page_down(animate=False)

    def action_follow(self) -> None:
        self._transcript.follow()

    @on(Prompt.EndOfInput)
    def _quit_at_end_of_input(self) -> None:
        self.exit()

    def _show_idle(self) -> None:
        """What the engine does when it has no request."""
        ready = self._engine == "ready"
        self._show(Status("ready") if ready else replace(self._status.status, state=self._engine))

    def _show(self, status: Status) -> None:
        """Put a status on the line, with the engine's newest numbers."""
        step = self._client.last_step
        kv = step.kv if step is not None else status.kv or self._status.status.kv
        self._status.status = replace(status, kv=kv, speculation=step.speculation if step else None)
