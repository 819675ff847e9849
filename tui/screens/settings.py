"""Sampling, system message, thinking, theme and panel: for this chat, or as the default of every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Select, Static, TextArea

from ferrum_mlx.chat.sampling_choice import MAX_TOKENS, NAMES, assignments, checked, made
from ferrum_mlx.chat.settings import save, settings_file
from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.sanitize import sanitize

from ..key_row import KeyRow

_THINKING = {"auto": None, "on": True, "off": False}
_PANEL = {"open": True, "closed": False}
_SEED_HINT = "a fresh one for every answer"
_STOP_HINT = "none; one a line, \\n in it is a new line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the screen shows and gives back.

    Attributes:
        sampling: what is set, by SamplingParams name; the rest is the model's suggestion, or the default.
        thinking: None leaves it to the model.
        theme: name of one of the app's.
        panel: the engine panel is open.
    """

    sampling: Mapping[str, object] = field(default_factory=dict)
    system: str = ""
    thinking: bool | None = None
    theme: str = ""
    panel: bool = True


class SettingsScreen(ModalScreen[Setup | None]):
    """Dismissed with what the chat is to have from now on; None leaves it as it was.

    Args:
        setup: what the chat has.
        suggested: sampling that the model's makers suggest.
        path: the settings file; None is the user's own.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Cancel", id="settings.close"),
        Binding("f2", "apply", "For this chat", id="settings.apply"),
        Binding("f3", "reset", "Model's sampling", id="settings.reset"),
        Binding("f4", "save", "Save as default", id="settings.save"),
    ]

    def __init__(
        self, setup: Setup, suggested: Mapping[str, float] | None = None, path: Path | None = None
    ) -> None:
        super().__init__()
        self._setup, self._path = setup, path or settings_file()
        self._stand_ins: dict[str, object] = {"max_tokens": MAX_TOKENS, **(suggested or {})}
        self._suggested = bool(suggested)

    def compose(self) -> ComposeResult:
        setup = self._setup
        with Vertical(id="settings", classes="picker") as box:
            box.border_title = "settings"
            with VerticalScroll(can_focus=False):
                whose = "what its makers suggest" if self._suggested else "the default"
                yield Static(Content(f"Sampling (grey: {whose}, where nothing is set)"), classes="head")
                for name in NAMES:
                    yield from self._sampling_field(name)
                yield Static("System message", classes="head")
                yield TextArea(setup.system, id="system", compact=True, tab_behavior="focus")
                yield Static("Screen and model", classes="head")
                with Horizontal(classes="field"):
                    yield Static("thinking", classes="label")
                    chosen = next(name for name, value in _THINKING.items() if value is setup.thinking)
                    yield _select(list(_THINKING), chosen, "thinking")
                with Horizontal(classes="field"):
                    yield Static("theme", classes="label")
                    themes = sorted(self.app.available_themes)
                    yield _select(themes, setup.theme if setup.theme in themes else self.app.theme, "theme")
                with Horizontal(classes="field"):
                    yield Static("engine panel", classes="label")
                    yield _select(list(_PANEL), "open" if setup.panel else "closed", "panel")
            yield Static(classes="note", markup=False)
        yield KeyRow(show_command_palette=False)

    def on_mount(self) -> None:
        self.query(Input).first().focus()
        self._say(f"The defaults are in {self._path}")

    def _sampling_field(self, name: str) -> ComposeResult:
        value = self._setup.sampling.get(name)
        with Horizontal(classes="field"):
            yield Static(name, classes="label")
            if name == "stop":
                yield TextArea(_as_lines(value), id="stop", compact=True, placeholder=_STOP_HINT)
            else:
                text = "none" if value is None and name in self._setup.sampling else _as_text(value)
                yield Input(text, id=name, compact=True, placeholder=self._stand_in(name))
        yield Static(classes="wrong", id=f"wrong-{name}", markup=False)

    def _stand_in(self, name: str) -> str:
        if name == "seed":
            return _SEED_HINT
        return _as_text(self._stand_ins.get(name, getattr(SamplingParams(), name)))

    # What is in the fields

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._value(event.input.id or "")

    @on(TextArea.Changed, "#stop")
    def _typed_stop(self) -> None:
        self._value("stop")

    @on(Input.Submitted)
    def _enter(self) -> None:
        self.action_apply()

    def _value(self, name: str) -> tuple[bool, object]:
        """Whether a field is set, and to what; its error is shown below it, and counts as not set."""
        wrong = self.query_one(f"#wrong-{name}", Static)
        wrong.display = False
        try:
            return self._read(name)
        except UsageError as error:
            wrong.update(Content(sanitize(str(error))))
            wrong.display = True
            return False, None

    def _read(self, name: str) -> tuple[bool, object]:
        if name == "stop":
            text = self.query_one("#stop", TextArea).text
            kept = self._setup.sampling.get("stop")
            if text == _as_lines(kept):  # a backslash of the file's own stays as it is
                return bool(kept), kept
            lines = [line.replace("\\n", "\n") for line in text.splitlines() if line]
            return bool(lines), checked("stop", tuple(lines)) if lines else None
        text = self.query_one(f"#{name}", Input).value.strip()
        return bool(text), assignments([f"{name}={text}"])[name] if text else None

    def _given(self) -> Setup | None:
        """All fields; None where one is wrong, which is said and has the focus."""
        found = {name: self._value(name) for name in NAMES}
        for name in NAMES:
            if self.query_one(f"#wrong-{name}").display:
                self.query_one(f"#{name}").focus()
                return None
        sampling = {name: value for name, (given, value) in found.items() if given}
        try:
            made({**self._stand_ins, **sampling})
        except UsageError as error:
            self._say(str(error), "error")
            return None
        return Setup(
            sampling=sampling,
            system=self.query_one("#system", TextArea).text.strip(),
            thinking=_THINKING[str(self.query_one("#thinking", Select).value)],
            theme=str(self.query_one("#theme", Select).value),
            panel=_PANEL[str(self.query_one("#panel", Select).value)],
        )

    # Actions

    def action_apply(self) -> None:
        if (setup := self._given()) is not None:
            self.dismiss(setup)

    def action_reset(self) -> None:
        """Take every sampling value out, so that the model's own stand."""
        for name in NAMES:
            if name == "stop":
                self.query_one("#stop", TextArea).text = ""
            else:
                self.query_one(f"#{name}", Input).value = ""

    def action_save(self) -> None:
        if (setup := self._given()) is None:
            return
        sampling = {name: setup.sampling.get(name) for name in NAMES}
        changes = {
            "sampling": sampling,
            "system": setup.system or None,
            "thinking": setup.thinking,
            "theme": setup.theme,
            "panel": setup.panel,
        }
        try:
            save(changes, self._path)
        except FerrumError as error:
            self._say(str(error), "error")
        else:
            self.app.notify(f"saved in {self._path}", markup=False)
            self.dismiss(setup)

    def _say(self, what: str, kind: str = "") -> None:
        note = self.query_one(".note", Static)
        note.update(Content(sanitize(what)))
        note.set_class(kind == "error", "-error")


def _select(names: list[str], value: str, id_: str) -> Select[str]:
    return Select([(name, name) for name in names], value=value, allow_blank=False, id=id_, compact=True)


def _as_text(value: object) -> str:
    if value is None or value == ():
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_lines(value: object) -> str:
    texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
    return "\n".join(str(text).replace("\n", "\\n") for text in texts)
