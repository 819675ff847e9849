"""Runs of a few requests through a real engine, with the logits behind every token kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from ferrum_mlx.batch import ItemResult, LogitsPolicy, TokenLogprobs, UnifiedBatch
from ferrum_mlx.capacity import Admission, Admitted, Deferred, NotSubmitted
from ferrum_mlx.config import EngineConfig
from ferrum_mlx.engine import Engine
from ferrum_mlx.executor import ModelExecutor, Pending, Submission
from ferrum_mlx.messages import Delta, Failed, Finished, Submit
from ferrum_mlx.output import TextCodec
from ferrum_mlx.speculative.accept import accepted
from ferrum_mlx.speculative.speculation import Speculation
from ferrum_mlx.verify.guesses import Guess, Guesses


@dataclass(frozen=True, slots=True)
class Library:
    """Who wrote the model's class, and their own generate: on their caches, without ours.

    Attributes:
        generate: an executor, a prompt and a count → as many greedy ids, and the logits behind each,
            [count, vocab] float32.
    """

    name: str
    generate: Callable[[ModelExecutor, Sequence[int], int], tuple[list[int], np.ndarray]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked. Runs build engines of their own over the executor of this one."""

    engine: Engine
    codec: TextCodec
    config: EngineConfig
    library: Library | None = None

    @property
    def executor(self) -> ModelExecutor:
        return self.engine.executor


@dataclass(slots=True)
class Output:
    """One request's tokens; rows[i] are the logits, [vocab], behind ids[i]."""

    ids: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Recorder:
    """An executor whose sampled rows bring their logits, with notes of what happened to each request.

    Attributes:
        rows: logits behind each token, by request.
        cached: tokens found in the prefix cache at the first admission.
        chunks: forwards that ended inside what was known of the request.
        preemptions: how often it made way.
        together: most requests in one forward; `mixed`, forwards with decodes and prefills in them.
        drafted, accepted: drafts that were verified, and those that were right.
    """

    def __init__(self, executor: ModelExecutor, *, use_prefix: bool) -> None:
        self._executor, self._use_prefix = executor, use_prefix
        self._names: dict[int, str] = {}
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.chunks: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.together = self.mixed = self.drafted = self.accepted = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def try_admit_prefill(
        self, request_id: str, prompt: Sequence[int], *, use_prefix: bool = True, adapter: str = ""
    ) -> Admission:
        use_prefix = use_prefix and self._use_prefix
        admission = self._executor.try_admit_prefill(
            request_id, prompt, use_prefix=use_prefix, adapter=adapter
        )
        if isinstance(admission, Admitted):
            self._names[admission.cache_id] = request_id
            self.cached.setdefault(request_id, admission.num_cached_tokens)
        return admission

    def preempt(self, request_id: str, cache_id: int) -> None:
        self._executor.preempt(request_id, cache_id)
        self.preemptions[request_id] += 1

    def submit(self, batch: UnifiedBatch) -> Submission:
        sizes = {len(item.q_tokens) > 1 for item in batch.items}
        self.mixed += len(sizes) > 1
        self.together = max(self.together, len(batch.items))
        for item in batch.items:
            self.chunks[self._names[item.cache_id]] += not item.is_final_chunk
        items = [
            replace(item, logits=LogitsPolicy.FULL) if item.logits is LogitsPolicy.SAMPLED else item
            for item in batch.items
        ]
        submission = self._executor.submit(UnifiedBatch(tuple(items)))
        if isinstance(submission, (Deferred, NotSubmitted)):
            return submission
        return _Recorded(self, batch, submission)

    def keep(self, batch: UnifiedBatch, results: Sequence[ItemResult]) -> None:
        for item, result in zip(batch.items, results, strict=True):
            if result.logits is not None:
                drafts = item.q_tokens[1:] if item.verify else ()
                count = len(accepted(drafts, result.token_ids))
                self.rows[self._names[result.cache_id]].extend(result.logits[-item.num_sampled :][:count])
                self.drafted += len(drafts)
                self.accepted += count - 1


@dataclass(frozen=True, slots=True)
class _Recorded:
    recorder: Recorder
    batch: UnifiedBatch
    pending: Pending

    def result(self) -> list[ItemResult]:
        results = self.pending.result()
        self.recorder.keep(self.batch, results)
        return results


@dataclass(frozen=True, slots=True)
class Run:
    outputs: dict[str, Output]  # by request
    seen: Recorder


def run(
    subject: Subject,
    arrivals: Mapping[int, Sequence[Submit]],
    *,
    use_prefix: bool = False,
    max_chunk: int | None = None,
    max_seqs: int | None = None,
    guess: Guess | None = None,
) -> Run:
    """Serve requests to their ends.

    Args:
        arrivals: requests by the step before which they arrive.
        use_prefix: False finds nothing in the prefix cache.
        max_chunk, max_seqs: EngineConfig's, where not the subject's own.
        guess: where drafts come from; None drafts nothing.

    Raises:
        FerrumError: a request failed.
    """
    config = replace(
        subject.config,
        max_prefill_chunk=max_chunk or subject.config.max_prefill_chunk,
        max_num_seqs=max_seqs or subject.config.max_num_seqs,
    )
    recorder = Recorder(subject.executor, use_prefix=use_prefix)
    engine = engine_over(subject, cast(ModelExecutor, recorder), config, guess and Guesses(guess))
    outputs: dict[str, Output] = defaultdict(Output)
    step = 0
    try:
        while step <= max(arrivals) or engine.has_work():
            for request in arrivals.get(step, ()):
                engine.submit(request)
            _take(engine, outputs)
            step += 1
    finally:
        for request in (request for requests in arrivals.values() for request in requests):
            engine.abort(request.request_id)  # what a failure left; the others are over
        while engine.has_work():  # a step of theirs may be in flight, on an executor that others share
            engine.step()
    for name, output in outputs.items():
        output.rows = recorder.rows[name]
    return Run(outputs, recorder)


def engine_over(
    subject: Subject, executor: ModelExecutor, config: EngineConfig, speculation: Speculation | None = None
) -> Engine:
    return Engine(
        executor,
        subject.codec,
        config,
        backend="verify",
        backend_reason="",
        log=subject.engine.log,
        speculation=speculation,
    )


def _take(engine: Engine, outputs: dict[str, Output]) -> None:
    for event in engine.step():
        match event:
            case Delta(name, token_ids=ids, logprobs=logprobs):
                outputs[name].ids += ids
                outputs[name].logprobs += logprobs
            case Finished(name, prompt_logprobs=logprobs):
                outputs[name].prompt_logprobs = logprobs
            case Failed(_, error):
                raise error
