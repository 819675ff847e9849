"""An engine's numbers as Prometheus text. What means the same as in vLLM has vLLM's name behind `ferrum_`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ferrum_mlx.metrics import StepStats
from ferrum_mlx.totals import Histogram, Totals


def exposition(totals: Totals, step: StepStats, model_name: str) -> str:
    """The text of one scrape, in the format 0.0.4; every sample is labelled with the model.

    Args:
        step: where the engine stands.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(totals, step, model_name))
    return generate_latest(registry).decode()


class _Numbers(Collector):
    def __init__(self, totals: Totals, step: StepStats, model_name: str) -> None:
        self._totals, self._step, self._model = totals, step, model_name

    def collect(self) -> Iterator[Metric]:
        for name, what, value in self._gauges():
            gauge = GaugeMetricFamily(f"ferrum_{name}", what, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        blocks = GaugeMetricFamily("ferrum_kv_blocks", "KV blocks by state.", labels=["model_name", "state"])
        for state, count in self._blocks().items():
            blocks.add_metric([self._model, state], count)
        yield blocks
        yield from self._adapters()
        for name, what, value in self._counters():
            counter = CounterMetricFamily(f"ferrum_{name}", what, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._successes()
        for name, what, histogram in self._histograms():
            yield self._family(name, what, histogram)

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        step, kv, cache = self._step, self._step.kv, self._step.cache
        yield "num_requests_running", "Requests that the steps have a part of.", step.running
        yield "num_requests_waiting", "Requests that wait, preempted ones among them.", step.waiting
        yield "num_requests_preempted", "Of the waiting, those that ran before.", step.preempted
        used = kv.used_blocks / kv.total_blocks if kv.total_blocks else 0.0
        yield "kv_cache_usage_perc", "Share of KV blocks that requests use; 1 is all.", used
        yield "prefix_cache_entries", "Blocks that a prompt can find.", cache.entries
        yield "prefix_cache_bytes", "Bytes of the blocks that a prompt can find.", cache.bytes

    def _adapters(self) -> Iterator[Metric]:
        """Where there are any."""
        labels = ["model_name", "adapter"]
        family = GaugeMetricFamily("ferrum_lora_requests", "Admitted requests by adapter.", labels=labels)
        for name, count in self._step.lora.active.items():
            family.add_metric([self._model, name], count)
        if self._step.lora.enabled:
            yield family

    def _blocks(self) -> Mapping[str, int]:
        """Every block once; a shared one counts as used, a cached one as free."""
        kv = self._step.kv
        return {
            "shared": kv.shared_blocks,
            "used_once": kv.used_blocks - kv.shared_blocks,
            "cached": kv.cached_blocks,
            "empty": kv.free_blocks - kv.cached_blocks,
        }

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        totals, step = self._totals, self._step
        yield "num_preemptions", "Requests that had to make room, each time.", step.preemptions
        yield (
            "prompt_tokens",
            "Prompt tokens of requests that ended, cached ones included.",
            totals.prompt_tokens,
        )
        yield "generation_tokens", "Tokens generated.", totals.generated_tokens
        yield "prefill_tokens", "Tokens computed by prefill, replays included.", totals.prefill_tokens
        yield "replayed_tokens", "Tokens computed again, of requests that ended.", totals.replayed_tokens
        yield "prefix_cache_queries", "Tokens of the prompts that were admitted.", totals.admitted_tokens
        yield "prefix_cache_hits", "Of those, tokens found in the prefix cache.", totals.cached_tokens
        yield "prefix_cache_evictions", "Blocks that lost their content to others.", step.cache.evictions
        yield "request_failures", "Requests that ended in an error.", totals.ended["error"]
        if (guesses := step.speculation) is not None:
            yield "spec_decode_num_drafts", "Verifies, one a request and step.", guesses.verifies
            yield "spec_decode_num_draft_tokens", "Guesses that were verified.", guesses.drafted
            yield "spec_decode_num_accepted_tokens", "Of those, the ones that were right.", guesses.accepted
            yield "spec_decode_draft_seconds", "Time spent on guessing.", guesses.draft_seconds

    def _successes(self) -> CounterMetricFamily:
        labels = ["model_name", "finished_reason"]
        family = CounterMetricFamily(
            "ferrum_request_success", "Requests that ended, by reason.", labels=labels
        )
        for reason in ("stop", "length", "abort"):
            family.add_metric([self._model, reason], self._totals.ended[reason])
        return family

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        totals = self._totals
        yield "time_to_first_token_seconds", "Arrival to first token.", totals.ttft_s
        yield "inter_token_latency_seconds", "Gaps between the tokens of a request.", totals.itl_s
        yield "e2e_request_latency_seconds", "Arrival to end.", totals.e2e_s
        yield "request_queue_time_seconds", "Arrival to the first step with a part of it.", totals.queue_s
        yield "request_prefill_time_seconds", "From that step to the first token.", totals.prefill_s
        yield "request_decode_time_seconds", "First token to last.", totals.decode_s
        yield "request_prompt_tokens", "Prompt tokens of a request.", totals.request_prompt_tokens
        yield "request_generation_tokens", "Generated tokens of a request.", totals.request_output_tokens
        yield "iteration_tokens_total", "Tokens of a step.", totals.step_tokens
        yield "step_seconds", "Duration of a step.", totals.step_s

    def _family(self, name: str, what: str, histogram: Histogram) -> HistogramMetricFamily:
        ends = [*map(str, map(float, histogram.bounds)), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(histogram.counts)), strict=True))
        family = HistogramMetricFamily(f"ferrum_{name}", what, labels=["model_name"])
        family.add_metric([self._model], buckets, histogram.total)
        return family
