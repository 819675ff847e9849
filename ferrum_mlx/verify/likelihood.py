"""What KV in fewer bits costs: the likelihood of a text, against K and V in the model's own precision."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

import numpy as np

from ferrum_mlx.kv.precision import LIKELIHOOD_BOUNDS
from ferrum_mlx.messages import Submit
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.verify.compare import FAULT, NOT_APPLICABLE, WITHIN, Row, Skipped, log_softmax
from ferrum_mlx.verify.runs import Subject, run
from ferrum_mlx.verify.texts import PROSE

TOKENS = 512
ROWS = 64  # of a part: copies of all logits in float64 would be large


def likelihood(subject: Subject) -> Row:
    """Mean NLL of a text through the pools, and by the model's own forward; a fault beyond the bound.

    Raises:
        Skipped: K and V are kept in the model's own dtype.
        FerrumError: the request failed.
    """
    executor = subject.executor
    kept, info = executor.info.kv_dtype, executor.info
    if not kept:
        raise Skipped(NOT_APPLICABLE, "K and V are kept in the model's own dtype")
    ids = subject.codec.encode(PROSE)[: min(TOKENS, executor.capabilities().kv_capacity - 1)]
    request = Submit("text", ids, SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    said = run(subject, {0: [request]}).outputs["text"].prompt_logprobs
    ours = -float(np.mean([token.logprob for token in said]))
    own = nll(executor.forward(ids, exact_kv=True), ids)
    change, bound = ours / own - 1, LIKELIHOOD_BOUNDS[kept]
    detail = (
        f"NLL of {len(ids)} tokens {ours:.4f} with {kept}, {own:.4f} with {info.dtype} ({change:+.2%}; "
        f"allowed: {bound:.1%}), perplexity {exp(ours):.3f} and {exp(own):.3f}"
    )
    return Row(outcome=WITHIN if abs(change) <= bound else FAULT, detail=detail)  # NaN is a fault


def nll(logits: np.ndarray, ids: Sequence[int]) -> float:
    """Mean over ids[1:], in nats; row i of the logits, [n, vocab], is about ids[i + 1]."""
    targets, total = np.asarray(ids[1:]), 0.0
    for start in range(0, len(targets), ROWS):
        part = targets[start : start + ROWS]
        scores = log_softmax(logits[start : start + len(part)])
        total -= float(scores[np.arange(len(part)), part].sum())
    return total / len(targets)
