"""The exposition text, read back by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ferrum_mlx.llm import LLM
from ferrum_mlx.metrics import (
    ITL_BOUNDS,
    CacheMetrics,
    KVUsage,
    Latencies,
    LoraMetrics,
    RequestStats,
    SpeculationStats,
    StepStats,
    Timings,
    Usage,
)
from ferrum_mlx.prometheus import exposition
from ferrum_mlx.sampling import SamplingParams
from ferrum_mlx.totals import Histogram, Totals

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
STEP = StepStats(
    step=3,
    seconds=0.02,
    prefill_tokens=30,
    decode_tokens=2,
    admitted_tokens=40,
    cached_tokens=10,
    running=2,
    waiting=3,
    preempted=1,
    preemptions=4,
    kv=KVUsage(16, 100, 25, shared_blocks=5, cached_blocks=15),
    cache=CacheMetrics(enabled=True, block_size=16, kv_dtype="x", evictions=6, entries=20, bytes=999),
)


def ended(reason: str, output: int = 3) -> RequestStats:
    return RequestStats(
        request_id="r",
        priority=0,
        finish_reason=reason,
        arrived=0.0,
        queue_s=0.2,
        prefill_s=0.3,
        decode_s=1.0,
        e2e_s=1.5,
        usage=Usage(40, output, 10),
        timings=Timings(0.5, 100.0, 2.0),
        itl=Latencies(count=2, total=1.0, p50=0.4, p99=0.6, max=0.6, buckets=(0,) * 11 + (2,) + (0,) * 5),
        preemptions=1,
        replayed_tokens=7,
    )


def samples(text: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(text: str, name: str, **labels: str) -> float:
    (one,) = [s.value for s in samples(text)[f"ferrum_{name}"] if s.labels.items() >= labels.items()]
    return one


@pytest.fixture
def text() -> str:
    totals = Totals()
    totals.add_step(STEP)
    totals.add_step(STEP)
    totals.add_tokens(6)
    for reason in ("length", "length", "abort"):
        totals.add_request(ended(reason))
    totals.add_failure()
    return exposition(totals, STEP, 'a "model"\n')


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_requests_running", 2),
        ("num_requests_waiting", 3),
        ("num_requests_preempted", 1),
        ("kv_cache_usage_perc", 0.25),
        ("prefix_cache_entries", 20),
        ("prefix_cache_bytes", 999),
        ("num_preemptions_total", 4),
        ("prompt_tokens_total", 120),
        ("generation_tokens_total", 6),
        ("prefill_tokens_total", 60),
        ("replayed_tokens_total", 21),
        ("prefix_cache_queries_total", 80),
        ("prefix_cache_hits_total", 20),
        ("prefix_cache_evictions_total", 6),
        ("request_failures_total", 1),
        ("time_to_first_token_seconds_count", 3),
        ("time_to_first_token_seconds_sum", 1.5),
        ("inter_token_latency_seconds_count", 6),
        ("inter_token_latency_seconds_sum", 3.0),
        ("e2e_request_latency_seconds_sum", 4.5),
        ("request_queue_time_seconds_sum", pytest.approx(0.6)),
        ("request_prefill_time_seconds_sum", pytest.approx(0.9)),
        ("request_decode_time_seconds_sum", 3.0),
        ("request_prompt_tokens_sum", 120),
        ("request_generation_tokens_sum", 9),
        ("iteration_tokens_total_sum", 64),
        ("step_seconds_count", 2),
    ],
)
def test_numbers(text: str, name: str, expected: object) -> None:
    assert value(text, name) == expected


def test_guesses_are_counted_where_there_are_any(text: str) -> None:
    assert not [name for name in samples(text) if "spec_decode" in name]
    stats = SpeculationStats(name="ngram", drafted=30, accepted=21, verifies=7, draft_seconds=0.5)
    counted = exposition(Totals(), replace(STEP, speculation=stats), "m")
    assert value(counted, "spec_decode_num_drafts_total") == 7
    assert value(counted, "spec_decode_num_draft_tokens_total") == 30
    assert value(counted, "spec_decode_num_accepted_tokens_total") == 21
    assert value(counted, "spec_decode_draft_seconds_total") == 0.5


def test_requests_by_adapter_where_there_are_any(text: str) -> None:
    assert "ferrum_lora_requests" not in samples(text)
    step = replace(STEP, lora=LoraMetrics(True, 2, {"a": 2, "b": 0}))
    text = exposition(Totals(), step, "m")
    assert value(text, "lora_requests", adapter="a") == 2
    assert value(text, "lora_requests", adapter="b") == 0


def test_labels(text: str) -> None:
    every = [sample for family in samples(text).values() for sample in family]
    assert {sample.labels["model_name"] for sample in every} == {'a "model"\n'}
    reasons = {s.labels["finished_reason"]: s.value for s in samples(text)["ferrum_request_success_total"]}
    assert reasons == {"stop": 0, "length": 2, "abort": 1}
    blocks = {s.labels["state"]: s.value for s in samples(text)["ferrum_kv_blocks"]}
    assert blocks == {"shared": 5, "used_once": 20, "cached": 15, "empty": 60}
    assert sum(blocks.values()) == STEP.kv.total_blocks


def buckets(text: str, name: str) -> Iterator[tuple[float, float]]:
    for sample in samples(text)[f"ferrum_{name}_bucket"]:
        yield float(sample.labels["le"]), sample.value


def test_buckets_are_cumulative_and_end_at_infinity(text: str) -> None:
    for name in [name.removeprefix("ferrum_") for name in samples(text) if name.endswith("_bucket")]:
        bounds, counts = zip(*buckets(text, name.removesuffix("_bucket")), strict=True)
        assert list(bounds) == sorted(bounds)
        assert list(counts) == sorted(counts)
        assert bounds[-1] == float("inf")
        assert counts[-1] == value(text, name.replace("_bucket", "_count"))
    gaps = dict(buckets(text, "inter_token_latency_seconds"))
    assert [bound for bound, count in gaps.items() if count] == [*ITL_BOUNDS[11:], float("inf")]


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(number)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def test_a_request_without_a_token_has_no_latencies() -> None:
    totals = Totals()
    totals.add_request(ended("abort", output=0))
    text = exposition(totals, STEP, "m")
    assert value(text, "e2e_request_latency_seconds_count") == 1
    assert value(text, "time_to_first_token_seconds_count") == 0
    assert value(text, "request_prefill_time_seconds_count") == 0


def test_an_engine_that_runs_counts_and_touches_no_global_registry() -> None:
    before = {family.name for family in REGISTRY.collect()}
    with LLM(backend="fake") as llm:
        assert value(llm.prometheus(), "iteration_tokens_total_count") == 0
        assert value(llm.prometheus(), "kv_cache_usage_perc") == 0
        outputs = llm.generate(["hello", "world", "x" * 5000], SHORT)
        text = llm.prometheus()
        assert value(text, "generation_tokens_total", model_name="fake") == 24
        assert value(text, "prompt_tokens_total") == 10
        assert value(text, "request_success_total", finished_reason="length") == 2
        assert value(text, "request_failures_total") == 1
        stats = [output.stats for output in outputs if output.stats]
        assert len(stats) == 2
        total = sum(each.timings.ttft_s for each in stats)
        assert value(text, "time_to_first_token_seconds_sum") == pytest.approx(total)
        assert value(text, "inter_token_latency_seconds_count") == 22
    assert {family.name for family in REGISTRY.collect()} == before
