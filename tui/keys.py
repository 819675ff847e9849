"""The keys of the chat screen, and other ones that a user gives; those of a widget stand with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from textual.binding import Binding, BindingsMap, BindingType
from textual.dom import DOMNode
from textual.keys import KEY_TO_UNICODE_NAME, REPLACED_KEYS, Keys, _character_to_key, key_to_character

from ferrum_mlx.errors import shown

BINDINGS: list[BindingType] = [
    Binding("escape", "stop", "Stop", id="chat.stop"),
    Binding("escape", "to_prompt", "To the prompt", id="chat.prompt"),
    Binding("f1", "help", "Help", id="chat.help"),
    Binding("ctrl+c", "interrupt", "Copy, stop or quit", show=False, priority=True, id="chat.interrupt"),
    Binding("ctrl+r", "regenerate", "Regenerate", priority=True, id="chat.regenerate"),
    Binding("ctrl+n", "new_chat", "New chat", priority=True, id="chat.new"),
    Binding("ctrl+o", "models", "Model", priority=True, id="chat.model"),
    Binding("ctrl+s", "sessions", "Sessions", priority=True, id="chat.sessions"),
    Binding("ctrl+b", "engine", "Engine", priority=True, id="chat.engine"),
    Binding("f2", "settings", "Settings", show=False, id="chat.settings"),
    Binding("pageup", "scroll(-1)", "Scroll up", show=False, priority=True, id="chat.up"),
    Binding("pagedown", "scroll(1)", "Scroll down", show=False, priority=True, id="chat.down"),
    Binding("ctrl+end", "follow", "Follow", show=False, priority=True, id="chat.follow"),
]
OF_TRANSCRIPT = (  # actions
    *("new_chat", "scroll", "follow", "regenerate"),
    *("models", "sessions", "settings", "engine"),
)
_MODIFIERS = {"ctrl", "alt", "shift", "super", "hyper", "meta"}
_NAMED = (
    {key.value.rpartition("+")[2] for key in Keys if key.value[0] != "<"}
    | set(KEY_TO_UNICODE_NAME)
    | set(REPLACED_KEYS)
)
_ALLOWED = (
    "allowed: a character, f1 to f24, enter, tab, space, escape, backspace, delete, insert, home, end, "
    "pageup, pagedown, up, down, left, right, each behind ctrl+, alt+ or shift+, and several with commas"
)


def ids() -> set[str]:
    """Of all bindings of the chat: what a user may give other keys."""
    ours = (each for each in _subclasses(DOMNode) if each.__module__.startswith("ferrum_tui."))
    own = (each for each in ours if not each.__module__.startswith("ferrum_tui.bench"))
    bindings = [binding for each in own for _, binding in BindingsMap(vars(each).get("BINDINGS", ()))]
    return {binding.id for binding in bindings if binding.id is not None}


def usable(keymap: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What of the settings file's keys can be, as Textual writes it; a note on each that cannot.

    An entry of which nothing is left leaves our own key.
    """
    good: dict[str, str] = {}
    notes: list[str] = []
    known = ids() if keymap else set()
    for name, keys in keymap.items():
        if name not in known:
            notes.append(f"[keys] {_no_id(name, known)}")
            continue
        named = [_named(key.strip()) for key in keys.split(",")]
        notes += [
            f"[keys] {name}: there is no key {shown(key.strip())}; {_ALLOWED}"
            for key, name_of_key in zip(keys.split(","), named, strict=True)
            if not name_of_key
        ]
        if found := [key for key in named if key]:
            good[name] = ",".join(found)
    return good, notes


def _named(key: str) -> str:
    """As an event has it; "" is none."""
    *modifiers, last = key[:-1].split("+") if key.endswith("+") else key.split("+")
    last = last or "plus"
    modifiers = [each.lower() for each in modifiers]
    last = last.lower() if "ctrl" in modifiers else last  # a terminal tells no capitals apart there
    if len(last) == 1:
        last = _character_to_key(last)
    is_key = last in _NAMED or key_to_character(last) is not None
    return "+".join([*modifiers, last]) if is_key and set(modifiers) <= _MODIFIERS else ""


def _no_id(name: str, known: set[str]) -> str:
    near = get_close_matches(name, known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    group = name.partition(".")[0]
    same = sorted(each for each in known if each.partition(".")[0] == group)
    groups = sorted({f"{each.partition('.')[0]}.…" for each in known})
    return (
        f"{shown(name)} names no key{hint}; allowed: {', '.join(same or groups)}; README has all, under Keys"
    )


def _subclasses(base: type[DOMNode]) -> Iterator[type[DOMNode]]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)
