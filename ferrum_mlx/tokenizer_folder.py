"""The tokenizer files of a checkpoint's folder, through transformers; what would blow up is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ferrum_mlx.checkpoint import check_file, read_json
from ferrum_mlx.errors import FerrumError, ModelFileError, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = (".json", ".model", ".txt", ".jinja")
_LARGEST_FILE = 256 << 20  # bytes; the largest known has 35 million
_MOST_GROWTH = 1000  # times the text's length, by rules that replace; real ones keep it
_AGAIN = "get the model again"


def from_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; code in the folder is never run.

    Raises:
        ModelFileError: files are missing, broken, or of no real tokenizer.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # its advice is about classes that are not used here
    for file in folder.iterdir():
        if file.suffix in _FILES and not file.is_dir():
            check_file(file, _LARGEST_FILE)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _check_growth(getattr(tokenizer, "backend_tokenizer", None), folder)
    except FerrumError:
        raise
    except Exception as error:  # the library raises anything, bare Exception included
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFileError(
            f"the tokenizer in {folder} cannot be loaded: {reason}", next_step=_AGAIN
        ) from error
    return tokenizer


def folder_eos(folder: Path) -> frozenset[int]:
    """Ids that end a generation, as the config files name them."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.exists():
            config = read_json(file)
            for part in (config, config.get("text_config")):
                value = part.get("eos_token_id") if isinstance(part, dict) else None
                values = value if isinstance(value, list) else [] if value is None else [value]
                if not all(type(token) is int for token in values):
                    raise ModelFileError(f"{file}: eos_token_id is {shown(value)}", "token ids are expected")
                found.update(values)
    return frozenset(found)


def _check_growth(backend: Any, folder: Path) -> None:
    """Forty rules "a becomes aa" make a terabyte of one letter, and nothing can interrupt them."""
    for kind in ("normalizer", "decoder"):
        part = getattr(backend, kind, None)
        if part is not None and (times := _growth(json.loads(part.__getstate__()))) > _MOST_GROWTH:
            raise ModelFileError(
                f"the tokenizer in {folder} makes a text {times:g} times as long by its {kind}",
                f"at most {_MOST_GROWTH} times is allowed",
                _AGAIN,
            )


def _growth(rule: dict[str, Any]) -> float:
    """How many times longer a rule, or a sequence of them, makes a text at most; at least 1."""
    times = 1.0
    for inner in rule.get("normalizers") or rule.get("decoders") or ():
        times *= _growth(inner)
    if rule.get("type") == "Replace":
        pattern = rule["pattern"].get("String") or "."  # a regular expression may match one character
        times *= max(1.0, len(rule["content"]) / len(pattern))
    return times
