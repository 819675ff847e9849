"""All checks of one model, and what is told of them: a table for people, an object for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from ferrum_mlx.errors import FerrumError, UsageError
from ferrum_mlx.messages import Ready
from ferrum_mlx.verify.checks import CHECKS, NEW_TOKENS, Baseline, baseline
from ferrum_mlx.verify.compare import FAULT, NOT_APPLICABLE, REFUSED, Row, Skipped
from ferrum_mlx.verify.runs import Subject

_HEADER = ("check", "largest difference", "KL", "top-1", "first differing token", "outcome")


@dataclass(frozen=True, slots=True)
class Report:
    ready: Ready
    numerics: str
    num_prompts: int
    rows: tuple[Row, ...]
    seconds: float

    @property
    def num_faults(self) -> int:
        return sum(row.outcome == FAULT for row in self.rows)

    @property
    def summary(self) -> str:
        skipped = sum(row.outcome in (REFUSED, NOT_APPLICABLE) for row in self.rows)
        held = len(self.rows) - skipped - self.num_faults
        return (
            f"{self.num_faults} faults, {held} checks hold, {skipped} did not run; numerics {self.numerics}, "
            f"{self.num_prompts} prompts × {NEW_TOKENS} tokens, {self.seconds:.0f} s"
        )

    def table(self) -> str:
        lines = [_HEADER, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def as_json(self) -> dict[str, object]:
        info = self.ready.info
        return {
            "ok": self.num_faults == 0,
            "model": info.model_id,
            "model_type": info.model_type,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "kv_dtype": info.kv_dtype or info.dtype,
            "backend": self.ready.backend,
            "backend_reason": self.ready.backend_reason,
            "device": info.device,
            "numerics": self.numerics,
            "notes": list(self.ready.notes),
            "off": list(self.ready.capabilities.off),
            "prompts": self.num_prompts,
            "tokens": NEW_TOKENS,
            "seconds": round(self.seconds, 2),
            "checks": [_json_row(row) for row in self.rows],
        }


def verify(subject: Subject, narrate: Callable[[str], None] = lambda what: None) -> Report:
    """Run every check.

    Raises:
        FerrumError: the plain run, which all the others are compared with, cannot be made.
    """
    started = perf_counter()
    narrate("the plain run: each prompt alone")
    base = baseline(subject)
    rows = []
    for i, (name, check) in enumerate(CHECKS.items(), 1):
        narrate(f"{i} of {len(CHECKS)}: {name}")
        start = perf_counter()
        row = _run(check, base)
        rows.append(replace(row, check=name, seconds=perf_counter() - start))
    return Report(
        ready=subject.engine.ready(),
        numerics=subject.config.numerics,
        num_prompts=len(base.prompts),
        rows=tuple(rows),
        seconds=perf_counter() - started,
    )


def _run(check: Callable[[Baseline], Row], base: Baseline) -> Row:
    try:
        return check(base)
    except Skipped as skipped:
        return Row(outcome=skipped.outcome, detail=skipped.why)
    except UsageError as error:  # the settings leave no room for this one
        return Row(outcome=REFUSED, detail=str(error))
    except FerrumError as error:
        return Row(outcome=FAULT, detail=str(error))


def _cells(row: Row) -> tuple[str, ...]:
    first = "" if row.top1 is None else "none"
    if row.first is not None:
        number, found = row.first
        first = f"prompt {number}, output {found.step}: {found.ours} for {found.theirs}"
    return (
        row.check,
        "" if row.largest_difference is None else f"{row.largest_difference:.2g}",
        "" if row.kl is None else f"{row.kl:.1g}",
        "" if row.top1 is None else f"{row.top1:.0%}",
        first,
        row.outcome + (f": {row.detail}" if row.detail else ""),
    )


def _json_row(row: Row) -> dict[str, object]:
    found = {} if row.first is None else {"prompt": row.first[0], **dataclasses.asdict(row.first[1])}
    return {
        "check": row.check,
        "outcome": row.outcome,
        "detail": row.detail,
        "largest_difference": row.largest_difference,
        "kl": row.kl,
        "top1": row.top1,
        "first_difference": found or None,
        "seconds": round(row.seconds, 2),
    }
