"""F1: the keys as they are now, and the slash commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingsMap, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from ferrum_mlx.chat.commands import COMMANDS
from ferrum_mlx.sanitize import sanitize

_EDITING = "editing"  # of widgets that are not ours
_DIM = "$foreground 55%"
_WIDEST = 24  # cells of a column of keys or commands


class HelpScreen(ModalScreen[None]):
    """Reads the bindings of the screen that it covers.

    Args:
        keymap: keys by the id of a binding, as the app has them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter", "dismiss", "Close", id="help.close"),
    ]

    def __init__(self, keymap: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._keymap = keymap or {}

    def compose(self) -> ComposeResult:
        groups = keys(self.app.screen_stack[-2], self._keymap)
        with VerticalScroll(id="help") as box:
            box.border_title = "keys"
            box.border_subtitle = "Esc closes"
            yield Static()
        self._groups = groups

    def on_resize(self) -> None:
        width = max(self.query_one("#help").scrollable_content_region.width, 10)
        self.query_one("#help Static", Static).update(Content("\n").join(self._lines(width)))

    def _lines(self, width: int) -> Iterator[Content]:
        display = self.app.get_key_display
        commands = [(f"/{command.name} {command.arguments}".rstrip(), command.help) for command in COMMANDS]
        for name, bindings in self._groups.items():
            if name == _EDITING:
                yield from _section("commands, in the prompt", commands, width)
            by_what: dict[str, list[str]] = {}
            for binding in bindings:
                shown = by_what.setdefault(binding.description, [])
                if (key := display(binding)) not in shown:
                    shown.append(key)
            by_keys: dict[str, str] = {}  # what a key does depends on what is there to do
            for what, shown in by_what.items():
                keys = ", ".join(shown)
                by_keys[keys] = (
                    f"{by_keys[keys]}, or {what[0].lower()}{what[1:]}" if keys in by_keys else what
                )
            yield from _section(name, list(by_keys.items()), width)


def keys(screen: Screen[object], keymap: Mapping[str, str]) -> dict[str, list[Binding]]:
    """The bindings of a screen by group, in the order of their groups' first; no description, no place.

    Those that are active, with whatever has the focus, then those of the app and of other widgets. A
    group is the first part of a binding's id; keys without an id are the app's, or of a box to write in.
    """
    groups: dict[str, list[Binding]] = {}
    editing: list[Binding] = []
    seen: set[tuple[str, str]] = set()
    active = [(each.node, each.binding) for each in screen.active_bindings.values()]
    for node, binding in [*active, *_of_widgets(screen, dict(keymap))]:
        if not binding.description or binding.system or (binding.key, binding.action) in seen:
            continue
        seen.add((binding.key, binding.action))
        if binding.id is not None:
            groups.setdefault(binding.id.partition(".")[0], []).append(binding)
        elif node is screen.app or node is screen:
            groups.setdefault("program", []).append(binding)
        else:
            editing.append(binding)
    return {**groups, _EDITING: editing}


def _of_widgets(screen: Screen[object], keymap: dict[str, str]) -> Iterator[tuple[DOMNode, Binding]]:
    """What the classes of the app and the widgets bind under an id, once a class; also what is off now,
    as keys of the screen below are while the help covers it."""
    nodes: list[DOMNode] = [screen.app, screen, *screen.walk_children()]
    kinds = {type(node): node for node in nodes}
    for kind, node in kinds.items():
        for base in kind.__mro__:
            bindings = BindingsMap(base.__dict__.get("BINDINGS", ()))
            bindings.apply_keymap(keymap)
            for _, binding in bindings:
                if binding.id is not None:
                    yield node, binding


def _section(title: str, pairs: list[tuple[str, str]], width: int) -> Iterator[Content]:
    """Lines of at most `width` cells, in two columns."""
    if not pairs:
        return
    yield Content.styled(title, _DIM)
    widest = max(Content(left).cell_length for left, _ in pairs)
    column = min(widest, _WIDEST, max(width // 3, 8))
    indent = Content(" " * (column + 2))
    for left, right in pairs:
        key = Content.styled(sanitize(left), "bold $text-accent")
        lines = Content(sanitize(right)).wrap(max(width - column - 2, 8))
        if key.cell_length > column:
            yield from key.wrap(width)
        else:
            yield Content.assemble(key.pad_right(column + 2 - key.cell_length), lines.pop(0))
        yield from (Content.assemble(indent, line) for line in lines)
    yield Content("")
