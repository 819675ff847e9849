"""Imports go down only, and what must start fast or survive an engine's death loads no array library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"ferrum_mlx": ROOT / "ferrum_mlx", "ferrum_tui": ROOT / "tui"}

# Lowest first. A module imports its own layer and those below; a package stands for all that is in it.
LAYERS = (
    (
        "errors",
        "config",
        "sampling",
        "metrics",
        "view",
        "events",
        "timing",
        "totals",
        "executor",
        "batch",
        "capacity",
        "model_info",
        "request",
        "messages",
        "sanitize",
        "plain",
        "nearties",
        "threads",
        "memory",
        "child_process",
    ),
    (
        *("kv", "scheduler", "speculative", "launched", "tokenizer", "detokenizer", "output", "intake"),
        *("chat_template", "template_process", "template_child", "thinking", "tokenizer_folder"),
        *(
            "adapters",
            "adapter_forms",
            "card_schema",
            "catalog",
            "checkpoint",
            "fit",
            "kept",
            "packing",
            "weights_size",
            "hub",
            "hub_fetch",
            "hub_card",
            "hub_repo",
            "hub_wheel",
            "loadable",
        ),
        *("files", "gguf", "gguf_quants"),
        *("gguf_values", "gguf_rope", "gguf_families", "gguf_config", "gguf_weights", "gguf_tokenizer"),
    ),
    ("engine",),
    ("verify",),
    (
        *("build", "build_speculation", "plan", "transport", "stream", "questions", "samples", "client"),
        *("answers", "prometheus", "inputs", "llm"),
    ),
    ("chat",),
    ("cli", "bench"),
)
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}
TUI = len(LAYERS)
# A backend takes plain data, the contract and the pool; its loader, the files found and their reader; the
# fake's text codec, the detokenizer and the thinking tags.
BACKEND_MAY = {
    *LAYERS[0],
    *(
        "adapters",
        "kv",
        "catalog",
        "checkpoint",
        "fit",
        "kept",
        "packing",
        "weights_size",
        "gguf_quants",
        "gguf_weights",
        "detokenizer",
        "thinking",
    ),
}
# Upward imports that are the design, never when the module is loaded: (importer, what it imports).
# A benchmark hands a peer the very weights that a backend loads.
LAZY_UP = {("build", "backends"), ("bench", "backends"), ("cli", "ferrum_tui"), ("transport", "build")}
# Who may import a heavy library at all, as prefixes of module names.
OWNERS = {
    "mlx": ("ferrum_mlx.backends.mlx", "ferrum_mlx.bench"),
    "mlx_lm": ("ferrum_mlx.backends.mlx", "ferrum_mlx.bench"),
    "torch": ("ferrum_mlx.backends.torch", "ferrum_mlx.bench"),
    "triton": ("ferrum_mlx.backends.torch",),
    "textual": ("ferrum_tui",),
}
IMPORTED_AS = {"markdown-it-py": "markdown_it"}
COMES_WITH_TORCH = {"triton"}  # where it is built for CUDA
COMES_WITH_NUMBA = {"llvmlite"}
HEAVY = {"mlx", "mlx_lm", "torch", "transformers"}


def modules() -> dict[str, Path]:
    """Every module of the project by its import name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


def imports(name: str, source: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """What a module imports, as absolute names, and whether only in a function or for types."""
    package = name.split(".") if is_package else name.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{start}.{alias.name}", lazy) for alias in node.names)
        types_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        inner = lazy or types_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    return walk(ast.parse(source), False)


def unit(name: str) -> str:
    """The name the tables know a module by; "" is the root package, with its lazy public names."""
    parts = name.split(".")
    if parts[0] == "ferrum_tui":
        return "ferrum_tui"
    return parts[1] if len(parts) > 1 else ""


def refusal(name: str, target: str, lazy: bool) -> str:
    """Why module `name` may not import `target`; "" when it may."""
    top = target.split(".")[0]
    if top in OWNERS and not name.startswith(OWNERS[top]):
        return f"{top} belongs to {' and '.join(OWNERS[top])}"
    if top not in FOLDERS:
        return ""
    here, there = unit(name), unit(target)
    if here == "" or (here, there) in LAZY_UP:
        return "" if lazy else "only inside a function, or for types"
    if there not in {*LAYER, "backends", "ferrum_tui"}:
        # A name of the root package itself: its public names belong to the top of the library.
        return "" if there.startswith("__") or LAYER.get(here, TUI) >= LAYER["cli"] else "unknown to LAYERS"
    if here == "backends":
        return backend_refusal(name, target)
    if there == "backends":
        return "only build imports backends"
    if LAYER.get(there, TUI) > LAYER.get(here, TUI):
        return "imports go down only"
    return ""


def backend_refusal(name: str, target: str) -> str:
    there = unit(target)
    if there == "backends":
        mine, theirs = name.split(".")[2:3], target.split(".")[2:3]
        shared = theirs in (["base"], ["flight"], ["step"], ["selfcheck"], ["zoo"])
        return "" if shared or theirs == mine else "a backend never imports another"
    return "" if there in BACKEND_MAY else f"a backend imports only {', '.join(sorted(BACKEND_MAY))}"


def violations(name: str, source: str, is_package: bool = False) -> list[str]:
    if unit(name) not in {*LAYER, "backends", "ferrum_tui", "", "__main__"}:
        return [f"{name} has no place in LAYERS"]
    checked = ((target, refusal(name, target, lazy)) for target, lazy in imports(name, source, is_package))
    return [f"{name} imports {target}: {why}" for target, why in checked if why]


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down_only(name: str) -> None:
    file = modules()[name]
    assert violations(name, file.read_text(), file.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ferrum_mlx.kv.block_pool", "import ferrum_mlx.engine"),
        ("ferrum_mlx.kv.block_pool", "from ..engine import Engine"),
        ("ferrum_mlx.scheduler", "def f():\n    from ferrum_mlx import engine"),
        ("ferrum_mlx.scheduler", "from ferrum_mlx import LLM"),
        ("ferrum_mlx.scheduler", "class C:\n    import mlx.core as mx"),
        ("ferrum_mlx.engine", "from ferrum_mlx.backends.fake import FakeExecutor"),
        ("ferrum_mlx.engine", "def f():\n    from ferrum_mlx.backends import fake"),
        ("ferrum_mlx.build", "from ferrum_mlx.backends.fake import FakeExecutor"),
        ("ferrum_mlx.backends.mlx.executor", "from ferrum_mlx.backends.torch import attention"),
        ("ferrum_mlx.backends.mlx.executor", "from ...scheduler import Scheduler"),
        ("ferrum_mlx.backends.mlx.executor", "import torch"),
        ("ferrum_mlx.cli.chat", "from ferrum_tui.app import ChatApp"),
        ("ferrum_mlx.cli.chat", "from textual.app import App"),
        ("ferrum_mlx.llm", "def f():\n    import ferrum_tui.app"),
        (
            "ferrum_mlx.executor",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ferrum_mlx.kv",
        ),
        ("ferrum_mlx.surprise", ""),
    ],
)
def test_the_checker_catches(name: str, source: str) -> None:
    assert len(violations(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ferrum_mlx.engine", "import json\nfrom ferrum_mlx.scheduler import Scheduler"),
        ("ferrum_mlx.build", "def f():\n    from ferrum_mlx.backends.fake import FakeExecutor"),
        ("ferrum_mlx.backends.mlx.executor", "import mlx.core\nfrom . import step\nfrom ..base import Base"),
        ("ferrum_mlx.cli.chat", "def f():\n    from ferrum_tui.app import ChatApp"),
        ("ferrum_tui.app", "from textual.app import App\nfrom ferrum_mlx.client import EngineClient"),
        ("ferrum_mlx.cli.main", "from ferrum_mlx import __version__"),
    ],
)
def test_the_checker_allows(name: str, source: str) -> None:
    assert violations(name, source) == []


def undeclared(name: str, source: str, is_package: bool = False) -> set[str]:
    """Third-party packages a module imports without pyproject.toml asking for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["cpu"], *extras["plot"]]
    packages = {re.split(r"[^a-z0-9-]", line)[0] for line in asked}
    known = {IMPORTED_AS.get(package, package.replace("-", "_")) for package in packages}
    tops = {target.split(".")[0] for target, _ in imports(name, source, is_package)}
    return (
        tops
        - known
        - COMES_WITH_TORCH
        - COMES_WITH_NUMBA
        - sys.stdlib_module_names
        - set(FOLDERS)
        - {"ferrum_models"}
    )


@pytest.mark.parametrize("name", sorted(modules()))
def test_third_parties_are_declared(name: str) -> None:
    file = modules()[name]
    assert undeclared(name, file.read_text(), file.name == "__init__.py") == set()


def test_an_undeclared_third_party_is_caught() -> None:
    assert undeclared("ferrum_mlx.hub", "import json, numpy, httpx\nimport requests.sessions") == {
        "httpx",
        "requests",
    }


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules after a fresh interpreter ran the code."""
    report = "import sys as _sys; print('loaded', *{m.partition('.')[0] for m in _sys.modules})"
    wrapped = f"import atexit\natexit.register(lambda: exec({report!r}))\n{code}"
    done = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    label, *names = done.stdout.splitlines()[-1].split()
    assert label == "loaded"
    return set(names)


def test_the_report_sees_a_heavy_import() -> None:
    assert "textual" in loaded_by("import textual.app")


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['ferrum-mlx', '--help']; from ferrum_mlx.cli.main import main; main()"
    loaded = loaded_by(code)
    assert "ferrum_mlx" in loaded
    assert loaded & (HEAVY | {"textual"}) == set()


CORE = ["ferrum_mlx", "ferrum_mlx.scheduler", "ferrum_mlx.engine", "ferrum_mlx.client"]


@pytest.mark.parametrize("name", CORE + [name for name in sorted(modules()) if ".kv." in name])
def test_the_core_loads_nothing_heavy(name: str) -> None:
    assert loaded_by(f"import {name}") & (HEAVY | {"textual"}) == set()


def test_the_screen_loads_no_array_library() -> None:
    names = [name for name in sorted(modules()) if name.startswith("ferrum_tui")]
    assert loaded_by("\n".join(f"import {name}" for name in names)) & HEAVY == set()
