"""Decode steps out of static buffers, captured and replayed: what they give and leave alone, and why not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'ferrum-mlx[torch]'")

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from ferrum_mlx.backends.torch import zoo
from ferrum_mlx.backends.torch.capture import CUDACapture, HostReads
from ferrum_mlx.backends.torch.executor import TorchExecutor
from ferrum_mlx.backends.torch.graphs import DecodeGraphs
from ferrum_mlx.backends.torch.tables import attend
from ferrum_mlx.batch import IN_FLIGHT, UnifiedBatch
from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.config import EngineConfig

from .driver import FULL, admit, item, run
from .tape import TapeCapture

# full, windows only, windows and softcap, windows and sinks, other dims for values, experts
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe")
SEQS = 5  # sizes 1, 2, 4 and 5


def build(name: str = "llama", **settings: Any) -> TorchExecutor:
    defaults: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "max_num_seqs": SEQS}
    config = EngineConfig(**(defaults | settings))
    executor = TorchExecutor(zoo.build(name), zoo.info(name), config, free_memory=2**24)
    executor.prepare_startup()
    return executor


def captured(name: str = "llama", **settings: Any) -> tuple[TorchExecutor, TapeCapture]:
    executor, tape = build(name, **settings), TapeCapture()
    executor.speed_up(lambda: attend, tape)
    assert executor.capabilities().off == ()
    tape.replays = 0
    return executor, tape


def pools(executor: TorchExecutor) -> list[torch.Tensor]:
    """All of them but the null blocks."""
    size = executor.kv.block_size
    return [array[size:] for s in executor._packed.storages for array in (s.keys, s.values)]


def decode(executor: TorchExecutor, lengths: dict[int, int], token: int) -> list[np.ndarray]:
    rows = [item(cache, [token + i], start, logits=FULL) for i, (cache, start) in enumerate(lengths.items())]
    logits = []
    for cache, result in zip(lengths, run(executor, *rows), strict=True):
        assert result.logits is not None
        assert result.token_ids == tuple(result.logits.argmax(-1))
        lengths[cache] += 1
        logits.append(result.logits[0])
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_replays_give_the_ordinary_forward_at_every_length_and_size(name: str) -> None:
    rng = random.Random(name)
    plain, (fast, tape) = build(name), captured(name)
    caches: list[dict[int, int]] = [{}, {}]
    for _ in range(12):
        if len(caches[0]) < SEQS:
            prompt = [rng.randrange(1, 190) for _ in range(rng.randint(2, 30))]
            for executor, lengths in zip((plain, fast), caches, strict=True):
                cache = admit(executor, prompt)
                run(executor, item(cache, prompt, 0))
                lengths[cache] = len(prompt)
        elif rng.random() < 0.7:
            for executor, lengths in zip((plain, fast), caches, strict=True):
                leaves = min(lengths)
                executor.release_cache(leaves)
                del lengths[leaves]
        token = rng.randrange(1, 190)
        want, got = (decode(e, lengths, token) for e, lengths in zip((plain, fast), caches, strict=True))
        np.testing.assert_allclose(got, want, atol=2e-5 * max(1, np.abs(want).max()))
    assert tape.replays == 12


def test_padding_rows_change_nothing() -> None:
    executor, tape = captured()
    caches = {admit(executor, [7] * n): n for n in (9, 3, 12)}
    for cache, n in caches.items():
        run(executor, item(cache, [7] * n, 0))
    before = [pool.clone() for pool in pools(executor)]
    decode(executor, caches, 20)  # three rows in a step of four
    assert tape.replays == 1
    for pool, old in zip(pools(executor), before, strict=True):
        assert int((pool != old).any(dim=(1, 2)).sum()) == 3  # the slots of the three tokens


@pytest.mark.parametrize("name", MODELS)
def test_verify_rows_are_replayed_beside_decodes(name: str) -> None:
    plain, (fast, tape) = build(name), captured(name)
    prompts, logits = [[5, 80, 113, 7, 7, 150, 31, 64, 9, 2, 77], [18, 140]], []
    for executor in (plain, fast):
        a, b = (admit(executor, prompt) for prompt in prompts)
        run(executor, *(item(c, p, 0) for c, p in zip((a, b), prompts, strict=True)))
        results = run(
            executor, item(a, [1, 2, 3], 11, verify=True, logits=FULL), item(b, [4], 2, logits=FULL)
        )
        executor.truncate_kv(a, 12)
        results += run(executor, item(a, [7, 8], 12, verify=True, logits=FULL))
        logits.append(np.concatenate([result.logits for result in results if result.logits is not None]))
    assert tape.replays == 2
    assert len(logits[0]) == 6
    np.testing.assert_allclose(*logits, atol=2e-5 * max(1, np.abs(logits[0]).max()))


def test_steps_with_rows_that_need_no_logits_are_not_replayed() -> None:
    executor, tape = captured()
    a, b = admit(executor, [5, 6, 7]), admit(executor, [9])
    run(executor, item(a, [5, 6, 7], 0), item(b, [9], 0, is_final_chunk=False))
    assert tape.replays == 0


def test_a_size_that_is_not_captured_takes_the_ordinary_forward() -> None:
    executor, tape = captured()
    graphs = executor._graphs
    assert graphs is not None
    assert graphs.sizes == [1, 2, 4, 5]
    graphs._sizes.remove(5)
    caches = {admit(executor, [3 + n]): 0 for n in range(SEQS)}
    decode(executor, caches, 20)
    assert tape.replays == 0
    caches.popitem()
    decode(executor, caches, 20)
    assert tape.replays == 1


def test_a_pool_of_few_blocks_is_enough() -> None:
    """One block a sequence, and fewer blocks than sequences that may run."""
    executor, tape = captured(max_model_len=16, block_size=16, kv_memory=4 * 16 * 4 * 2 * 2 * 10 * 4)
    assert executor.kv.num_blocks == (3,)
    graphs = executor._graphs
    assert graphs is not None
    assert graphs.sizes == [1, 2, 3]
    decode(executor, {admit(executor, [3]): 0}, 20)
    assert tape.replays == 1


def test_a_token_in_flight_comes_out_of_the_replay_before() -> None:
    """The ids of a replayed step are the device's own, submitted before the ones before it are read."""
    plain, (fast, tape) = build(), captured()
    ids = []
    for executor in (plain, fast):
        cache, other = admit(executor, [5, 6, 7]), admit(executor, [8, 9])
        executor.reserve_kv_slots([KvSlotRequest(cache, 16), KvSlotRequest(other, 16)])
        first = executor.submit(UnifiedBatch((item(cache, [5, 6, 7], 0), item(other, [8, 9], 0))))
        waiting, got = [first], []
        for step in range(6):
            rows = [item(cache, [IN_FLIGHT], 3 + step), item(other, [IN_FLIGHT], 2 + step)]
            waiting.append(executor.submit(UnifiedBatch(tuple(rows if step % 2 else rows[::-1]))))
            got += [sorted((r.cache_id, r.token_ids) for r in waiting.pop(0).result())]
        ids.append([*got, sorted((r.cache_id, r.token_ids) for r in waiting[0].result())])
    assert tape.replays == 6
    assert [[tokens for _, tokens in step] for step in ids[0]] == [
        [tokens for _, tokens in step] for step in ids[1]
    ]


def test_full_logits_of_a_step_outlive_the_next_replay() -> None:
    executor, _ = captured()
    cache = admit(executor, [5, 6, 7])
    run(executor, item(cache, [5, 6, 7], 0))
    executor.reserve_kv_slots([KvSlotRequest(cache, 8)])
    first = executor.submit(UnifiedBatch((item(cache, [1], 3, logits=FULL),)))
    second = executor.submit(UnifiedBatch((item(cache, [IN_FLIGHT], 4, logits=FULL),)))
    (one,), (two,) = first.result(), second.result()
    assert one.logits is not None
    assert two.logits is not None
    assert one.token_ids == tuple(one.logits.argmax(-1))
    assert not np.array_equal(one.logits, two.logits)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and cut at attention as on CUDA; the pieces are then run as they are, not made into kernels."""
    pieces = []

    def keep(piece: Any, _: Any) -> Any:
        pieces.append(piece)
        return piece.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    plain, fast = build(max_num_seqs=2), build(max_num_seqs=2)
    fast.speed_up(lambda: attend, lambda run: run, compiled=True)
    assert fast.capabilities().off == ()
    made = len(pieces)
    assert made
    results = []
    for executor in (plain, fast):
        lengths = {admit(executor, [7] * n): n for n in (9, 3)}
        for cache, n in lengths.items():
            run(executor, item(cache, [7] * n, 0))
        results.append([decode(executor, lengths, token) for token in (20, 30)])
    np.testing.assert_allclose(*results, atol=2e-5 * max(1, np.abs(results[0]).max()))
    assert len(pieces) == made  # nothing is compiled while requests wait


# Why there are none


def off(executor: TorchExecutor, capture: Any = None, make: Any = None) -> str:
    executor.speed_up(make or (lambda: attend), capture or TapeCapture())
    assert executor._graphs is None
    return "; ".join(executor.capabilities().off)


def test_a_rotary_embedding_that_looks_at_the_longest_position_is_not_captured() -> None:
    reason = off(build("llama/dynamic"))
    assert "reads values on the host (_local_scalar_dense in modeling_rope_utils.py:" in reason


def test_experts_that_are_looped_over_are_not_captured() -> None:
    executor = build("qwen3_moe")
    executor._packed._model.set_experts_implementation("eager")
    assert "reads values on the host (" in off(executor)


def test_what_a_capture_raises_is_the_reason() -> None:
    def capture(run: Any) -> Any:
        raise RuntimeError("out of stream")

    reason = off(build(), capture)
    assert reason == "captured decode steps: 5 rows cannot be captured: RuntimeError: out of stream"


def test_a_replay_that_is_off_is_not_used() -> None:
    def stale(run: Any) -> Any:
        result = run()
        return lambda: result  # a replay that repeats nothing

    assert "a replay of 5 rows is off by " in off(build(), stale)


def test_what_was_taken_from_the_host_is_found_by_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control of the tape too: were its replays to run the model's Python, this one would be right."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    turn = LlamaRotaryEmbedding.forward

    def by_the_host(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return turn(self, x, torch.tensor([[int(position) for position in position_ids[0]]]))

    executor = build()
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", by_the_host)
    assert "reads values on the host (" in off(executor)
    monkeypatch.setattr(DecodeGraphs, "_host_reads", lambda self: None)
    executor._packed.off.clear()
    assert "a replay of 5 rows is off by " in off(executor)


def test_a_cuda_capture_warms_up_apart_and_shares_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stubs of torch.cuda: in which order it is called, since no test here has a GPU."""
    said: list[Any] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            said.append("wait")

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def entered(name: str, *what: Any, **settings: Any) -> Iterator[None]:
        said.append((name, settings))
        yield
        said.append("end")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", partial(entered, "stream"))
    monkeypatch.setattr(torch.cuda, "graph", partial(entered, "graph"))
    results = iter([torch.zeros(1), torch.zeros(1), captured_result := torch.ones(1)])

    def step() -> torch.Tensor:
        said.append("run")
        return next(results)

    replay = CUDACapture()(step)
    warm_up = ["wait", ("stream", {}), "run", "run", "end", "wait"]
    assert said == [*warm_up, ("graph", {"pool": "pool"}), "run", "end"]
    assert replay() is replay() is captured_result
    assert said[-2:] == ["replay", "replay"]


def test_without_the_kernel_there_are_none_either() -> None:
    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    executor = build()
    executor.slow_down(kernel=True)  # the CPU's
    kernel, graphs = off(executor, make=absent).split("; ")
    assert kernel == "paged kernel: triton is not installed"
    assert graphs == "captured decode steps: they need the paged kernel, which is off"


def test_exact_numerics_keep_their_route() -> None:
    assert off(build(numerics="exact")).startswith("paged kernel: exact numerics take a route of their own")


def test_indexing_by_positions_reads_nothing_and_by_a_mask_does() -> None:
    values, places, mask = torch.arange(4.0), torch.tensor([1, 2]), torch.tensor([True, False, True, False])
    for read, wanted in ((lambda: values[places], False), (lambda: values[mask], True)):
        with HostReads() as reads:
            read()
        assert bool(reads.found) == wanted
    with HostReads() as reads:
        torch.topk(values.softmax(0), 2).indices.sort()
        values.index_copy_(0, places, torch.zeros(2))
    assert reads.found is None
