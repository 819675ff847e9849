"""Our classes hide none of Textual's attributes: a `_closed` of ours would stop a widget's loop."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
from textual.dom import DOMNode

import ferrum_tui

FOLDER = Path(ferrum_tui.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(FOLDER).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if file.stem != "__init__"
)
# Meant to be set:
MEANT = {
    "BINDINGS",
    "CSS_PATH",
    "TITLE",
    "animation_level",
    "border_title",
    "border_subtitle",
    "display",
    "text",
    "theme",
    "tooltip",
}


def ours() -> list[type[DOMNode]]:
    modules = [importlib.import_module(f"ferrum_tui.{name}") for name in MODULES]
    classes = [
        (module.__name__, cls) for module in modules for cls in vars(module).values() if inspect.isclass(cls)
    ]
    return [cls for home, cls in classes if issubclass(cls, DOMNode) and cls.__module__ == home]


def assigned(source: str) -> set[str]:
    """Attributes of self that a class assigns, annotates or declares."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                    names.add(part.attr)
    return names


def hidden(cls: type[DOMNode], names: set[str]) -> set[str]:
    base: Any = next(c for c in cls.__mro__ if not c.__module__.startswith(("ferrum_tui", "tests")))
    return {name for name in names - MEANT if hasattr(base(), name)}


@pytest.mark.parametrize("cls", ours())
def test_hides_nothing(cls: type[DOMNode]) -> None:
    assert hidden(cls, assigned(inspect.getsource(cls))) == set()


def test_the_check_sees_one() -> None:
    from textual.widget import Widget

    source = "class Bad(Widget):\n    def __init__(self):\n        self._closed, self._mine = None, 1"
    assert hidden(Widget, assigned(source)) == {"_closed"}
