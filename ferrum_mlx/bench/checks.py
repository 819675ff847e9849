"""Whether what is measured is text: greedy ids against another computation of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferrum_mlx import nearties
from ferrum_mlx.errors import one_line
from ferrum_mlx.messages import Submit
from ferrum_mlx.nearties import Fault
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.runs import Output, Subject, run
from ferrum_mlx.verify.texts import TEXTS

TOKENS = 24
EQUAL, NEAR_TIE, FAULT = "equal ids", "near-tie", "fault"
DIFFERS, NOT_CHECKED = "differs", "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """`outcome` is one of the words above; only a fault fails the benchmark."""

    name: str
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}" + (f", {self.detail}" if self.detail else "")


def short_prompt(subject: Subject) -> list[int]:
    room = subject.executor.capabilities().kv_capacity - TOKENS
    return subject.codec.encode(TEXTS[0])[:room]


def text_is_sane(subject: Subject) -> tuple[Check, list[int]]:
    """Our greedy ids against the library's generate, or where none runs the model's own forward."""
    prompt = short_prompt(subject)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    ours = run(subject, {0: [Submit("check", prompt, params)]}).outputs["check"]
    name, theirs = _reference(subject, prompt, ours)
    found = nearties.compare(
        prompt,
        ours.ids,
        theirs.ids,
        lambda known: ours.rows[len(known) - len(prompt)],
        lambda known: theirs.rows[len(known) - len(prompt)],
        subject.executor.info.rounding,
    )
    return _check(f"greedy ids = {name}", found), ours.ids


def _reference(subject: Subject, prompt: list[int], ours: Output) -> tuple[str, Output]:
    why = ""
    if subject.library is not None:
        try:
            ids, rows = subject.library.generate(subject.executor, prompt, TOKENS)
            return f"{subject.library.name}'s generate", Output(ids, list(rows))
        except Exception as error:  # a library raises what it likes
            why = f", since {subject.library.name}'s generate does not run here: {one_line(error)}"
    logits = subject.executor.forward([*prompt, *ours.ids[:-1]])[len(prompt) - 1 :]
    return f"the model's own forward{why}", Output([int(row.argmax()) for row in logits], list(logits))


def same_ids(
    subject: Subject, name: str, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Check:
    """Two systems over the same weights; where they part, on the logits of two ways to compute them."""
    if len(ours) != len(theirs):
        return Check(name, FAULT, f"{len(theirs)} tokens came instead of {len(ours)}")
    found = nearties.compare(
        prompt,
        ours,
        theirs,
        lambda known: _paged_row(subject, known),
        lambda known: subject.executor.forward(known)[-1],
        subject.executor.info.rounding,
    )
    rounding = subject.executor.info.rounding
    if isinstance(found, Fault) and rounding in nearties.ROUNDING:
        # What decided was rounded by other shapes than what is computed here: only its size can be judged.
        row = subject.executor.forward([*prompt, *theirs[: found.step]])[-1]
        if abs(found.gap) <= nearties.limit(rounding, row):
            return Check(name, NEAR_TIE, str(found))
    return _check(name, found)


def _paged_row(subject: Subject, known: list[int]) -> np.ndarray:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return run(subject, {0: [Submit("row", known, params)]}).outputs["row"].rows[0]


def first_difference(name: str, ours: Sequence[int], theirs: Sequence[int]) -> Check:
    """Of systems that round otherwise, by design: told, and never a fault."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return Check(name, DIFFERS, f"from output {step} on; its weights or their rounding are others")
    return Check(name, EQUAL)


def _check(name: str, found: nearties.Divergence | None) -> Check:
    if found is None:
        return Check(name, EQUAL)
    return Check(name, FAULT if isinstance(found, Fault) else NEAR_TIE, str(found))
