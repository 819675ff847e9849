"""What is told of a benchmark: Markdown for people, CSV and JSON for programs. All three have one source.

The JSON object, version 1 (a key is never renamed or given another meaning; new ones may be added):

version, tool           1; name and version of this program
complete                False after Ctrl+C: it holds what was measured until then
machine                 cpu, cores, threads (that the engine multiplies with), memory_bytes, system, python,
                        packages: name → version
engine                  model, model_type, parameters, dtype, quantization, computes_in (dtype of the
                        products), quality (what packing the weights cost, or ""), backend, backend_reason,
                        device, numerics, speculative, speculation_why (why nothing is guessed now, or ""),
                        parameter_bytes, kv_dtype, kv_bytes_per_token, kv_pool_bytes, notes,
                        peak_rss_bytes (of the process, before any peer was there)
bandwidth_bytes_per_s   of this machine, measured in this run; null where it was not
settings                reps, seed
checks                  name, outcome ("equal ids", "near-tie", "differs", "not checked", "fault"), detail
absent                  peer, why
skipped                 test, streams, system, why
results                 test, streams, system, method, figures: name → {n, mean, sd, median, min, max, values}
ratios                  test, streams, system, method, figure, n, mean, sd, median, min, max, values: this
                        engine over the system, and above 1 it is the better one

The names of figures are defined in ferrum_mlx/bench/trace.py, ceiling.py and kernels.py; their last word is
the unit.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ferrum_mlx.bench.markdown import document
from ferrum_mlx.bench.runner import Results
from ferrum_mlx.bench.trace import Figures

VERSION = 1
_SPREAD = ("n", "mean", "sd", "median", "min", "max")
_CSV_COLUMNS = ("test", "streams", "system", "method", "figure", *_SPREAD)
RATIOS = ("prefill_tps", "decode_tps", "output_tps", "ttft_s", "longest_gap_s", "call_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one figure over the repetitions; `sd` is the sample's, 0 of a single value."""

    n: int
    mean: float
    sd: float
    median: float
    min: float
    max: float
    values: tuple[float, ...]


def spread(values: Sequence[float]) -> Spread:
    return Spread(
        len(values),
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else 0.0,
        statistics.median(values),
        min(values),
        max(values),
        tuple(values),
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A test on one system; or, in `ratios`, this engine against one, where above 1 it is the better."""

    test: str
    streams: int
    system: str
    method: str
    figures: dict[str, Spread]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`machine`, `engine` and `settings` are facts to print as they are."""

    results: Results
    ours: str
    machine: Mapping[str, object]
    engine: Mapping[str, object]
    settings: Mapping[str, object]
    absent: Mapping[str, str]
    bandwidth: float = 0.0
    complete: bool = True

    @property
    def lines(self) -> list[Line]:
        return [
            Line(*key, self.results.methods[key], _spreads(list(by_rep.values())))
            for key, by_rep in sorted(self.results.runs.items(), key=lambda item: self._order(item[0]))
        ]

    @property
    def ratios(self) -> list[Line]:
        found = []
        for line in self.lines:
            test, streams, system = line.test, line.streams, line.system
            ours = self.results.runs.get((test, streams, self.ours), {})
            theirs = self.results.runs[test, streams, system]
            pairs = [(ours[rep], theirs[rep]) for rep in theirs if rep in ours]
            if system != self.ours and pairs:
                ratios = _spreads([_ratios(*pair) for pair in pairs])
                found.append(Line(test, streams, system, line.method, ratios))
        return found

    def as_json(self) -> str:
        told = {
            "version": VERSION,
            "tool": self.settings["tool"],
            "complete": self.complete,
            "machine": self.machine,
            "engine": self.engine,
            "bandwidth_bytes_per_s": self.bandwidth or None,
            "settings": {key: value for key, value in self.settings.items() if key != "tool"},
            "checks": [asdict(check) for check in self.results.checks.values()],
            "absent": [{"peer": peer, "why": why} for peer, why in self.absent.items()],
            "skipped": [
                {"test": test, "streams": streams, "system": system, "why": why}
                for (test, streams, system), why in self.results.skipped.items()
            ],
            "results": [asdict(line) for line in self.lines],
            "ratios": [
                {"test": line.test, "streams": line.streams, "system": line.system, "method": line.method}
                | {"figure": name, **asdict(found)}
                for line in self.ratios
                for name, found in line.figures.items()
            ],
        }
        return json.dumps(told, ensure_ascii=False, allow_nan=False)

    def as_csv(self) -> str:
        """One row a figure; those of ratios are named after it, as in "ratio decode_tps"."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_CSV_COLUMNS)
        for prefix, lines in (("", self.lines), ("ratio ", self.ratios)):
            for line in lines:
                for name, found in line.figures.items():
                    of = (line.test, line.streams, line.system, line.method, prefix + name)
                    writer.writerow((*of, *(getattr(found, column) for column in _SPREAD)))
        return out.getvalue().rstrip("\n")

    def as_markdown(self) -> str:
        return document(self)

    def _order(self, key: tuple[str, int, str]) -> tuple[int, bool]:
        """Cases as they came first, ours before the others."""
        firsts = list(dict.fromkeys(known[:2] for known in self.results.runs))
        return firsts.index(key[:2]), key[2] != self.ours


def _spreads(runs: Sequence[Figures]) -> dict[str, Spread]:
    names = dict.fromkeys(name for figures in runs for name in figures)
    return {name: spread([figures[name] for figures in runs if name in figures]) for name in names}


def _ratios(ours: Figures, theirs: Figures) -> Figures:
    """Above 1 where ours is better: more tokens a second, fewer seconds."""
    return {
        name: theirs[name] / ours[name] if name.endswith("_s") else ours[name] / theirs[name]
        for name in RATIOS
        if ours.get(name) and theirs.get(name)
    }
