"""ferrum-mlx: a local LLM engine you can see.

The public names are loaded when they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrum_mlx.answers import RequestOutput as RequestOutput
    from ferrum_mlx.config import EngineConfig as EngineConfig
    from ferrum_mlx.errors import FerrumError as FerrumError
    from ferrum_mlx.llm import LLM as LLM
    from ferrum_mlx.sampling import SamplingParams as SamplingParams

_HOME = {
    "LLM": "ferrum_mlx.llm",
    "RequestOutput": "ferrum_mlx.answers",
    "SamplingParams": "ferrum_mlx.sampling",
    "EngineConfig": "ferrum_mlx.config",
    "FerrumError": "ferrum_mlx.errors",
}
__all__ = ["LLM", "EngineConfig", "FerrumError", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
