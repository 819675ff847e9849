"""When tokens came, and the figures made of that: the definitions that every system is measured by.

Moments are seconds of `time.perf_counter`. What is not defined for a run is absent, never 0.

ttft_s          arrival to first token, the median over the streams
prefill_tps     prompt tokens that no cache had, over first arrival to last first token
decode_tps      tokens of all streams behind the moment at which the last of them has its first token, up
                to the moment at which the first of them ends, over that time. Of one stream: the n - 1
                behind the first, over first token to last. Of several: full batches, no prefill in between.
output_tps      all output tokens, over first arrival to last token: what a user of the whole gets
itl_p50_s …     gaps between the tokens of a stream, all streams together, percentiles by nearest rank
quiet_gap_s     the median gap of running streams before a long prompt arrives
longest_gap_s   their longest gap from its arrival to its first token
cached_tokens   prompt tokens found in a prefix cache
outside_forward  share of the time of steps that only decode which no forward took: the engine's own Python
acceptance_rate, acceptance_length    accepted ÷ drafted; 1 + accepted ÷ drafts
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ferrum_mlx.errors import FerrumError

Figures = dict[str, float]


@dataclass(slots=True)
class Stream:
    """One request.

    Attributes:
        ids: empty where a system tells the text alone.
        measured: False of one that only prepares others.
        intrudes: it is the long prompt that comes in while others run.
    """

    name: str
    prompt: list[int]
    arrived: float
    times: list[float] = field(default_factory=list)  # one a token
    ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    measured: bool = True
    intrudes: bool = False
    ended: bool = False

    def add(self, now: float, ids: Sequence[int]) -> None:
        """Tokens that came together."""
        self.times += [now] * len(ids)
        self.ids += ids

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


@dataclass(slots=True)
class Trace:
    """One run of a case on one system.

    Attributes:
        drafts: how often guesses were verified; `drafted` and `accepted` count the guesses.
        step_s, forward_s: seconds of the steps that only decode, and of the forwards in them.
    """

    streams: list[Stream] = field(default_factory=list)
    peak_memory_bytes: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def measured(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.measured]

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.times) for stream in self.streams)


def prefill_figures(trace: Trace) -> Figures:
    streams = trace.measured
    span = max(stream.times[0] for stream in streams) - min(stream.arrived for stream in streams)
    computed = sum(len(stream.prompt) - stream.cached_tokens for stream in streams)
    return {**_ttft(streams), **_rate("prefill_tps", computed, span), **_cached(streams)}


def decode_figures(trace: Trace) -> Figures:
    streams = trace.measured
    begun = sum(bool(stream.times) for stream in streams)
    if begun < len(streams):
        raise FerrumError(
            f"only {begun} of {len(streams)} streams had begun when the first ended",
            next_step="raise --kv-memory, or lower --batch",
        )
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    count = sum(start < moment <= end for stream in streams for moment in stream.times)
    if len(streams) == 1:
        count = len(streams[0].times) - 1  # some may have come together with the first
    gaps = [
        after - before
        for stream in streams
        for before, after in pairwise(stream.times)
        if start <= before and after <= end
    ]
    figures = {**_rate("decode_tps", count, end - start), **itl(gaps), **_speculation(trace)}
    if trace.step_s > 0:
        figures["outside_forward"] = 1 - trace.forward_s / trace.step_s
    return figures | (_output_rate(streams) if len(streams) > 1 else {})


def load_figures(trace: Trace) -> Figures:
    """Of requests that come and go."""
    streams = trace.measured
    gaps = [gap for stream in streams for gap in stream.gaps]
    figures = {**_ttft(streams), **_output_rate(streams), **itl(gaps), **_cached(streams)}
    return figures | _speculation(trace)


def admission_figures(trace: Trace) -> Figures:
    """Of streams that run while one long prompt comes in."""
    intruder = next((stream for stream in trace.streams if stream.intrudes), None)
    if intruder is None or not intruder.times:
        raise FerrumError("the running streams ended before the long prompt was in")
    running = [stream for stream in trace.streams if not stream.intrudes]
    arrived, first = intruder.arrived, intruder.times[0]
    before, during = [], []
    for stream in running:
        for earlier, later in pairwise(stream.times):
            if later <= arrived:
                before.append(later - earlier)
            elif earlier < first:
                during.append(later - earlier)
    quiet, longest = statistics.median(before), max(during)
    return {
        "quiet_gap_s": quiet,
        "longest_gap_s": longest,
        "gap_ratio": longest / quiet if quiet > 0 else 0.0,
        **_ttft([intruder]),
        **_rate("prefill_tps", len(intruder.prompt) - intruder.cached_tokens, first - arrived),
    }


def itl(gaps: Sequence[float]) -> Figures:
    if not gaps:
        return {}
    ordered = sorted(gaps)
    return {f"itl_p{percent}_s": percentile(ordered, percent) for percent in (50, 90, 99)}


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least that share of the values do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _ttft(streams: Sequence[Stream]) -> Figures:
    return {"ttft_s": statistics.median(stream.times[0] - stream.arrived for stream in streams)}


def _output_rate(streams: Sequence[Stream]) -> Figures:
    span = max(stream.times[-1] for stream in streams) - min(stream.arrived for stream in streams)
    return _rate("output_tps", sum(len(stream.times) for stream in streams), span)


def _rate(name: str, count: int, seconds: float) -> Figures:
    return {name: count / seconds} if seconds > 0 and count > 0 else {}


def _cached(streams: Sequence[Stream]) -> Figures:
    cached = sum(stream.cached_tokens for stream in streams)
    return {"cached_tokens": float(cached)} if cached else {}


def _speculation(trace: Trace) -> Figures:
    if not trace.drafted:
        return {}
    return {
        "acceptance_rate": trace.accepted / trace.drafted,
        "acceptance_length": 1 + trace.accepted / trace.drafts,
    }
