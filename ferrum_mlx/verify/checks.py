"""The checks: each runs the same prompts another way, and compares with the plain run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ferrum_mlx import nearties
from ferrum_mlx.errors import one_line
from ferrum_mlx.messages import Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.compare import (
    CONSISTENT,
    FAULT,
    NOT_APPLICABLE,
    REFUSED,
    Comparison,
    Row,
    Skipped,
    log_softmax,
)
from ferrum_mlx.verify.guesses import spoiled
from ferrum_mlx.verify.likelihood import likelihood
from ferrum_mlx.verify.memory import check_pools
from ferrum_mlx.verify.runs import Output, Run, Subject, run
from ferrum_mlx.verify.texts import TEXTS

NEW_TOKENS = 8
CHUNK = 7  # no divisor of a block
SEEDED = 3  # prompts whose samples are looked at; the others are their batchmates


@dataclass(slots=True)
class Baseline:
    """The plain run: every prompt alone, whole, cold, greedy."""

    subject: Subject
    prompts: list[list[int]]
    outputs: list[Output] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return self.subject.executor.info.rounding

    @property
    def allowed(self) -> str:
        """What a user must know of the limit that differences are held to."""
        if self.dtype != self.subject.executor.info.kv_dtype:
            return ""
        return f"{self.dtype} KV: logits may be {nearties.tolerance(self.dtype):.0%} of the largest apart"

    def row(self, comparison: Comparison, detail: str = "") -> Row:
        detail = "; ".join(filter(None, [detail, self.allowed]))
        return comparison.row(exact=self.subject.config.numerics == "exact", detail=detail)

    def compare(self, outputs: Sequence[Output], detail: str = "") -> Row:
        """Against the plain run."""
        comparison = Comparison(self.dtype)
        for prompt, ours, theirs in zip(self.prompts, outputs, self.outputs, strict=True):
            comparison.add(prompt, ours, theirs)
        return self.row(comparison, detail)

    def requests(self, priority: int = 0) -> list[Submit]:
        return [greedy(str(i), prompt, priority=priority) for i, prompt in enumerate(self.prompts)]

    def of(self, result: Run) -> list[Output]:
        return [result.outputs[str(i)] for i in range(len(self.prompts))]


def greedy(name: str, prompt: list[int], count: int = NEW_TOKENS, priority: int = 0) -> Submit:
    return Submit(name, prompt, SamplingParams(max_tokens=count, ignore_eos=True), priority=priority)


def baseline(subject: Subject) -> Baseline:
    """Make the plain run; prompts are cut where the context is short.

    Raises:
        FerrumError: a request failed.
    """
    room = subject.executor.capabilities().kv_capacity - NEW_TOKENS
    base = Baseline(subject, [subject.codec.encode(text)[:room] for text in TEXTS])
    for i, request in enumerate(base.requests()):
        base.outputs.append(run(subject, {0: [request]}).outputs[str(i)])
    return base


def dense(base: Baseline) -> Row:
    """The model's own forward over prompt and output, without a cache."""
    executor, comparison = base.subject.executor, Comparison(base.dtype)
    for prompt, ours in zip(base.prompts, base.outputs, strict=True):
        logits = executor.forward([*prompt, *ours.ids[:-1]])[len(prompt) - 1 :]
        comparison.add(prompt, ours, Output([int(row.argmax()) for row in logits], list(logits)))
    return base.row(comparison)


def library(base: Baseline) -> Row:
    """The library's own generate, on its own caches."""
    theirs = base.subject.library
    if theirs is None:
        backend = base.subject.engine.ready().backend
        raise Skipped(NOT_APPLICABLE, f"the {backend} backend has no library")
    comparison = Comparison(base.dtype)
    for prompt, ours in zip(base.prompts, base.outputs, strict=True):
        try:
            ids, rows = theirs.generate(base.subject.executor, prompt, NEW_TOKENS)
        except Exception as error:  # a library raises what it likes
            raise Skipped(
                REFUSED, f"{theirs.name}'s generate does not run here: {one_line(error)}"
            ) from error
        comparison.add(prompt, ours, Output(ids, list(rows)))
    return base.row(comparison, theirs.name)


def batched(base: Baseline) -> Row:
    """All prompts together, one more entering at each step."""
    result = run(base.subject, {i: [request] for i, request in enumerate(base.requests())})
    if result.seen.together < 2:
        raise Skipped(REFUSED, "the KV pool holds one request at a time; raise --kv-memory")
    seen = f"up to {result.seen.together} together, {result.seen.mixed} steps with prefill and decode"
    return base.compare(base.of(result), seen)


def chunked(base: Baseline) -> Row:
    """Prompts in chunks."""
    result = run(base.subject, {0: base.requests()}, max_chunk=CHUNK)
    if not any(result.seen.chunks.values()):
        raise Skipped(REFUSED, f"the context leaves no room for prompts above {CHUNK} tokens")
    return base.compare(base.of(result), f"chunks of {CHUNK} tokens")


def prefix_hit(base: Baseline) -> Row:
    if base.subject.executor.recurrent_state_spec():
        raise Skipped(NOT_APPLICABLE, "its layers keep a state; see snapshot hit = miss")
    return _hit(base)


def snapshot_hit(base: Baseline) -> Row:
    if not base.subject.executor.recurrent_state_spec():
        raise Skipped(NOT_APPLICABLE, "no layer of it keeps a state")
    return _hit(base)


def _hit(base: Baseline) -> Row:
    """The prompts again, now behind what is left of the runs before."""
    if not base.subject.executor.capabilities().prefix_cache:
        raise Skipped(REFUSED, "--no-prefix-cache")
    result = run(base.subject, {0: base.requests()}, use_prefix=True)
    hits = [count for count in result.seen.cached.values() if count]
    if not hits:
        longest, block = max(map(len, base.prompts)), base.subject.config.block_size
        if longest <= block:
            raise Skipped(REFUSED, f"no hit: the longest prompt has {longest} tokens, a block {block}")
        raise Skipped(REFUSED, "no hit: the KV pool is too small to keep ten prompts; raise --kv-memory")
    return base.compare(base.of(result), f"{len(hits)} prompts found {sum(hits)} tokens")


def preempted(base: Baseline) -> Row:
    """Every request makes way for an urgent one, and is computed again from its first token on."""
    urgent = [greedy(f"urgent {i}", prompt[:3], count=1) for i, prompt in enumerate(base.prompts)]
    arrivals = {0: base.requests(priority=1), 3: urgent}
    result = run(base.subject, arrivals, max_seqs=len(base.prompts))
    count = len(+result.seen.preemptions)
    if not count:
        raise Skipped(REFUSED, "nobody was preempted")
    return base.compare(base.of(result), f"{count} of {len(base.prompts)} preempted")


def speculative(base: Baseline) -> Row:
    """Drafts beside prefills and decodes: the plain run's own tokens, every third one wrong."""
    executor = base.subject.executor
    if not executor.capabilities().speculative_decoding:
        raise Skipped(REFUSED, "its layers keep a state, which no rejected draft can leave")
    answers = {str(i): output.ids for i, output in enumerate(base.outputs)}
    guess = spoiled(answers, executor.info.vocab_size)
    result = run(base.subject, {i: [request] for i, request in enumerate(base.requests())}, guess=guess)
    seen = result.seen
    if not seen.drafted:
        raise Skipped(REFUSED, "no step had room for drafts")
    return base.compare(base.of(result), f"{seen.accepted} of {seen.drafted} drafts accepted")


def seeded(base: Baseline) -> Row:
    """Samples beside batchmates and without.

    Sixteen bits round a row by the shape of its batch, which may turn a sample over: there the
    batchmates change, and the shape does not.
    """
    chosen, others = base.prompts[:SEEDED], base.prompts[SEEDED:]
    ours = [_sampled(str(i), prompt, i) for i, prompt in enumerate(chosen)]
    mates = [_sampled(f"mate {i}", prompt, 50 + i) for i, prompt in enumerate(others)]
    beside = run(base.subject, {0: [*ours, *mates]})
    if beside.seen.together < 2:
        raise Skipped(REFUSED, "the KV pool holds one request at a time; raise --kv-memory")
    if base.dtype in nearties.ROUNDING:
        changed = [_sampled(f"mate {i}", prompt[::-1], 90 + i) for i, prompt in enumerate(others)]
        reference, against = run(base.subject, {0: [*ours, *changed]}).outputs, "other batchmates"
    else:
        alone = [run(base.subject, {0: [request]}).outputs for request in ours]
        reference, against = {name: out for outputs in alone for name, out in outputs.items()}, "alone"
    comparison = Comparison(base.dtype, sampled=True)
    for i, prompt in enumerate(chosen):
        comparison.add(prompt, beside.outputs[str(i)], reference[str(i)])
    return base.row(comparison, f"{SEEDED} seeds beside {len(mates)} batchmates, against {against}")


def _sampled(name: str, prompt: list[int], seed: int) -> Submit:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, top_p=0.95, seed=seed)
    return Submit(name, prompt, params)


def logprobs(base: Baseline) -> Row:
    """Logprobs and ranks of prompt and output, against those of the model's own forward."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    chosen = base.prompts[:SEEDED]
    result = run(base.subject, {0: [Submit(str(i), prompt, params) for i, prompt in enumerate(chosen)]})
    largest, wrong = 0.0, ""
    for i, prompt in enumerate(chosen):
        output = result.outputs[str(i)]
        logits = base.subject.executor.forward([*prompt, *output.ids[:-1]])
        said = [*output.prompt_logprobs, *output.logprobs]
        if [token.token_id for token in said] != [*prompt[1:], *output.ids]:
            return Row(outcome=FAULT, detail=f"prompt {i}: logprobs are not those of its tokens, in order")
        for row, token in zip(logits, said, strict=True):
            scores = log_softmax(row)
            ranked = np.sort(scores)[::-1]
            pairs = [(token.token_id, token.rank, token.logprob)]
            pairs += [(top, rank, logprob) for rank, (top, logprob) in enumerate(token.top, 1)]
            apart = max(
                max(abs(scores[token_id] - logprob), abs(ranked[rank - 1] - logprob))
                for token_id, rank, logprob in pairs
            )
            largest = max(largest, float(apart)) if apart == apart else float(apart)
            if not apart <= 2 * nearties.limit(base.dtype, row):  # a logit's error, and the sum's
                wrong = wrong or f"prompt {i}: off by {apart:.3g}"
    detail = "; ".join(filter(None, [wrong, "largest difference of logprobs", base.allowed]))
    return Row(outcome=FAULT if wrong else CONSISTENT, detail=detail, largest_difference=largest)


def adapted(base: Baseline) -> Row:
    """All prompts together, each through another adapter or through none, against the model's own forward."""
    executor, comparison = base.subject.executor, Comparison(base.dtype)
    names = ["", *base.subject.config.adapter_names]
    if len(names) == 1:
        raise Skipped(NOT_APPLICABLE, "no adapter is loaded: --adapter NAME=FOLDER")
    chosen = [names[i % len(names)] for i in range(len(base.prompts))]
    pairs = zip(base.requests(), chosen, strict=True)
    result = run(
        base.subject, {i: [replace(request, adapter=name)] for i, (request, name) in enumerate(pairs)}
    )
    for prompt, name, ours in zip(base.prompts, chosen, base.of(result), strict=True):
        logits = executor.forward([*prompt, *ours.ids[:-1]], adapter=name)[len(prompt) - 1 :]
        comparison.add(prompt, ours, Output([int(row.argmax()) for row in logits], list(logits)))
    return base.row(comparison, f"up to {result.seen.together} together, through {len(names) - 1} and none")


CHECKS: dict[str, Callable[[Baseline], Row]] = {
    "paged = dense": dense,
    "paged = library's generate": library,
    "batched = alone": batched,
    "chunked = whole": chunked,
    "prefix hit = miss": prefix_hit,
    "snapshot hit = miss": snapshot_hit,
    "preempted = not": preempted,
    "speculation = plain": speculative,
    "seed alone = beside others": seeded,
    "logprobs = the logits'": logprobs,
    "adapters together = dense": adapted,
    "quantized KV = the model's": lambda base: likelihood(base.subject),
    "no pool is copied": lambda base: check_pools(base.subject, greedy("memory", base.prompts[0])),
}
