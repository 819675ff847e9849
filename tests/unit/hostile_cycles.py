"""What leads back to itself, or never ends: links, an index, a template, a file that is a pipe.

Each case changes a copy of the sound files, and says what is loaded then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

Case = Callable[[Path], str]  # a copy of hostile_files' folder → the part of it that is loaded
DEEP = "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}"
LONG = "{% set x = namespace(s='ab') %}{% for i in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}"


def looped(name: str) -> Case:
    """A file that is a link to itself."""

    def change(folder: Path) -> str:
        path = folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(path.name)
        return name.split("/")[0]

    return change


def piped(name: str) -> Case:
    """A file that is a pipe nobody writes to: who opens it waits for ever."""

    def change(folder: Path) -> str:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return name.split("/")[0]

    return change


def endless(name: str) -> Case:
    def change(folder: Path) -> str:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")
        return name.split("/")[0]

    return change


def each_other(folder: Path) -> str:
    """Two shards that are links to each other."""
    for name, other in ((1, 2), (2, 1)):
        (folder / f"hf/model-{name}.safetensors").unlink()
        (folder / f"hf/model-{name}.safetensors").symlink_to(f"model-{other}.safetensors")
    return "hf"


def index_of_itself(folder: Path) -> str:
    index = folder / "hf/model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, index.name)}))
    return "hf"


def index_of_its_folder(folder: Path) -> str:
    index = folder / "hf/model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, ".")}))
    return "hf"


def folder_in_itself(folder: Path) -> str:
    """Harmless: nobody walks into it."""
    (folder / "hf/tokenizer").symlink_to(".")
    (folder / "hf/additional_chat_templates").symlink_to(".")
    return "hf"


def template(source: str) -> Case:
    def change(folder: Path) -> str:
        (folder / "hf/chat_template.jinja").write_text(source)
        return "hf"

    return change


CASES: dict[str, Case] = {
    "an index that names itself": index_of_itself,
    "an index that names its folder": index_of_its_folder,
    "shards that are each other": each_other,
    "a folder in itself": folder_in_itself,
    "a template that calls itself": template(DEEP),
    "a template that doubles its text": template(LONG),
    "a template that includes itself": template("{% include 'chat_template.jinja' %}"),
}
PLACES = (
    *("hf/config.json", "hf/model-1.safetensors", "hf/model.safetensors.index.json", "hf/tokenizer.json"),
    *("hf/tokenizer_config.json", "hf/generation_config.json", "hf/chat_template.jinja", "hf/other.json"),
    *(
        "model.gguf",
        "peft/adapter_config.json",
        "peft/adapter_model.safetensors",
        "mlx_lm/adapters.safetensors",
    ),
)
for place in PLACES:
    CASES[f"{place} is a link to itself"] = looped(place)
    CASES[f"{place} is a pipe"] = piped(place)
    CASES[f"{place} is /dev/zero"] = endless(place)
LOADED = {"a folder in itself"}  # all others are refused
