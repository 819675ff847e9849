"""One benchmark from the engine to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ferrum_mlx.bench import checks, machine, peers
from ferrum_mlx.bench.ceiling import bandwidth
from ferrum_mlx.bench.ours import Ours
from ferrum_mlx.bench.progress import Absent, Bandwidth, Tell, untold
from ferrum_mlx.bench.report import Report
from ferrum_mlx.bench.runner import Runner
from ferrum_mlx.bench.systems import PeerAbsentError, System
from ferrum_mlx.bench.workloads import Case
from ferrum_mlx.config import DEFAULT_CONTEXT, EngineConfig
from ferrum_mlx.errors import FerrumError
from ferrum_mlx.verify.runs import Subject


def fitting(config: EngineConfig, cases: Sequence[Case]) -> EngineConfig:
    """With room for the longest sequence and the most streams, where nothing else was asked for."""
    longest = max(case.longest for case in cases)
    streams = max(case.streams for case in cases) + 1  # one may come in while the others run
    wanted = config.max_model_len or (longest if longest > DEFAULT_CONTEXT else None)
    return replace(
        config,
        max_model_len=wanted,
        max_num_seqs=max(config.max_num_seqs, streams),
        max_num_batched_tokens=max(config.max_num_batched_tokens, streams),
    )


def benchmark(
    subject: Subject,
    config: EngineConfig,
    cases: Sequence[Case],
    *,
    vs: Sequence[str],
    reps: int,
    seed: int,
    say: Callable[[str], None],
    tell: Tell = untold,
    adapter: str = "",
) -> Report:
    """Measure. After Ctrl+C the report holds what was measured until then, and says so.

    Args:
        adapter: that our requests go through; "" is none.

    Raises:
        FerrumError: a request of ours failed, or the text is not the model's.
    """
    runner = Runner(Ours(subject, config, adapter), cases, reps, seed, say, tell)
    found: list[System] = []
    absent: dict[str, str] = {}
    rss = 0
    complete = True
    try:
        tell(subject.engine.ready())
        tell(runner.plan())
        ids = _checked_text(runner)
        runner.warm_up(peers=False)
        rss = machine.peak_rss()
        _measure_bandwidth(runner)
        if vs:
            say("setting up the peers")
            setting = peers.Setting(subject, config, cases)
            for name in vs:
                found += _peer(name, setting, absent, say, tell)
            runner.peers = found
            tell(runner.plan())
            runner.check_peers(checks.short_prompt(subject), ids)
            runner.warm_up(peers=True)
        runner.measure()
    except KeyboardInterrupt:
        complete = False
    finally:
        for system in found:
            system.close()
    return Report(
        results=runner.results,
        ours=runner.ours.name,
        machine=machine.facts(subject.engine.ready().backend),
        engine=_engine(runner.ours, rss or machine.peak_rss()),
        settings={"tool": machine.tool(), "reps": reps, "seed": seed},
        absent=absent,
        bandwidth=runner.bandwidth,
        complete=complete,
    )


def _peer(
    name: str, setting: peers.Setting, absent: dict[str, str], say: Callable[[str], None], tell: Tell
) -> list[System]:
    """The peer, if it is here; else why not goes to `absent`."""
    try:
        return [peers.find(name, setting)]
    except PeerAbsentError as error:
        absent[name] = str(error)
        tell(Absent(name, str(error)))
        say(f"{name} is absent: {error}")
        return []


def _checked_text(runner: Runner) -> list[int]:
    """Greedy ids of a short prompt.

    Raises:
        FerrumError: they are not the model's.
    """
    runner.say("checking the text")
    check, ids = checks.text_is_sane(runner.ours.subject)
    runner.note(check)
    runner.say(str(check))
    if check.outcome == checks.FAULT:
        raise FerrumError(f"{check}: this is not the model's text, so nothing is measured")
    return ids


def _measure_bandwidth(runner: Runner) -> None:
    """Where there are weights to be read."""
    subject = runner.ours.subject
    if subject.executor.memory().parameter_bytes:
        runner.say("measuring how fast memory is read")
        ready = subject.engine.ready()
        runner.bandwidth = bandwidth(ready.backend, ready.info.device)
        runner.tell(Bandwidth(runner.bandwidth))


def _engine(ours: Ours, rss: int) -> dict[str, object]:
    config, speculation = ours.config, ours.speculation
    ready, memory = ours.subject.engine.ready(), ours.subject.executor.memory()
    return {
        "model": ready.info.model_id,
        "model_type": ready.info.model_type,
        "parameters": ready.info.num_parameters,
        "dtype": ready.info.dtype,
        "quantization": ready.info.quantization,
        "computes_in": ready.info.rounding,
        "quality": ready.info.quality,
        "backend": ready.backend,
        "backend_reason": ready.backend_reason,
        "device": ready.info.device,
        "numerics": config.numerics,
        "adapter": ours.adapter,
        "speculative": config.speculative,
        "speculation_why": speculation.stats().why if speculation else "",
        "parameter_bytes": memory.parameter_bytes,
        "kv_dtype": ready.info.kv_dtype or ready.info.dtype,
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_pool_bytes": memory.kv_pool_bytes,
        "peak_rss_bytes": rss,
        "notes": list(ready.notes),
    }
