"""Before the first request: does this model, paged and packed, compute what it computes alone?

Two sequences share a step, one of them in two chunks and a decode row; their logits are compared with
the model's own on each sequence alone. A model that fails is refused: no architecture is trusted by its name.
"""

from __future__ import annotations

import numpy as np

from ferrum_mlx.batch import ItemResult, LogitsPolicy, UnifiedItem
from ferrum_mlx.capacity import Admitted, KvSlotRequest
from ferrum_mlx.errors import FerrumError, ModelFileError, UnsupportedModelError
from ferrum_mlx.executor import ModelExecutor

TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}  # of the largest logit
PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1])


def check(executor: ModelExecutor) -> None:
    """Raises UnsupportedModelError when the paged logits are not the model's own."""
    model_type = executor.info.model_type
    prompts = [[token % executor.info.vocab_size for token in prompt] for prompt in PROMPTS]
    caches: list[int] = []
    try:
        expected = [executor.forward(prompt)[-1] for prompt in prompts]
        if not all(np.isfinite(logits).all() for logits in expected):
            raise ModelFileError(
                f"{executor.info.model_id} computes values that are not finite: its weights are damaged",
                next_step="get the model again",
            )
        results = _run(executor, prompts, caches)
    except UnsupportedModelError as error:  # out of a layer, which does not know the type
        raise UnsupportedModelError(f"{model_type}: {error.what}", error.allowed, error.next_step) from error
    except FerrumError:
        raise
    except Exception as error:  # whatever an architecture does with cache objects it does not expect
        raise UnsupportedModelError(
            f"{model_type} cannot be driven through paged attention: {_first_line(error)}",
            next_step="choose another model",
        ) from error
    finally:
        for cache_id in caches:
            executor.release_cache(cache_id)
    for want, got in zip(expected, results, strict=True):
        _compare(model_type, executor.info.dtype, want, got.logits)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _run(executor: ModelExecutor, prompts: list[list[int]], caches: list[int]) -> list[ItemResult]:
    long, short = prompts
    for prompt in prompts:
        admission = executor.try_admit_prefill(f"selfcheck-{len(caches)}", prompt)
        if not isinstance(admission, Admitted):
            raise UnsupportedModelError(f"the KV pool cannot hold {sum(map(len, prompts))} tokens")
        caches.append(admission.cache_id)
    executor.reserve_kv_slots([KvSlotRequest(c, len(p)) for c, p in zip(caches, prompts, strict=True)])
    first = [
        UnifiedItem(cache_id=caches[0], q_tokens=tuple(long[:4]), pos_offset=0, is_final_chunk=False),
        _final(caches[1], short, 0),
    ]
    done = executor.batch_prefill(first)[1]
    second = UnifiedItem(cache_id=caches[0], q_tokens=tuple(long[4:-1]), pos_offset=4, is_final_chunk=False)
    executor.batch_prefill([second])
    return [executor.prefill(_final(caches[0], long, len(long) - 1)), done]


def _final(cache_id: int, prompt: list[int], start: int) -> UnifiedItem:
    return UnifiedItem(
        cache_id=cache_id, q_tokens=tuple(prompt[start:]), pos_offset=start, logits=LogitsPolicy.FULL
    )


def _compare(model_type: str, dtype: str, want: np.ndarray, got: np.ndarray | None) -> None:
    assert got is not None
    largest = float(np.abs(want).max())
    difference = float(np.abs(want - got[-1]).max())
    if not difference <= TOLERANCE[dtype] * max(1.0, largest):  # also refuses NaN
        raise UnsupportedModelError(
            f"{model_type} is not exact through paged attention: logits up to {largest:.3g} differ by "
            f"{difference:.3g}",
            next_step="choose another model",
        )
