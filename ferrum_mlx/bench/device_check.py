"""`python -m ferrum_mlx.bench.device_check`: is the torch backend right and fast on this NVIDIA GPU?

In at most eight minutes: the paged kernel against its plain form, the contract suite over CUDA, and the
decode speed of a Llama-shaped bf16 model with random weights, beside what the GPU's memory bandwidth
allows. Without a GPU the same routes run on a tiny model on the CPU, by the kernel's plain form and with
nothing captured: that shows that the script works, and nothing of CUDA. Ends with one line of JSON. Exit
code 1 when something computes wrongly, fails or does not end in time; a speed below its target is only
said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from ferrum_mlx.bench import device_runs
from ferrum_mlx.errors import one_line

NO_GPU = "no NVIDIA GPU: CUDA figures unmeasured"
ROOM = 20.0  # seconds that a section needs at least
TESTS = ("tests/contract", "tests/unit/backends/test_torch_paged_kernel.py")
FRACTION_TARGET = 0.6  # of the bandwidth ceiling, one stream
BATCH_TARGET = 10.0  # times one stream, 32 streams


class Checks:
    """What has been found so far, and how much time is left; `found` is the JSON's object."""

    def __init__(self, budget: float) -> None:
        self._end = perf_counter() + budget
        self.found: dict[str, Any] = {"failed": [], "skipped": []}

    @property
    def left(self) -> float:
        return self._end - perf_counter()

    def section(self, name: str, work: Callable[[], Any]) -> Any:
        """work()'s result, kept under `name`; a failure is kept instead and does not end the others."""
        if self.left < ROOM:
            click.echo(f"{name}: skipped, {max(0, self.left):.0f} s are left")
            self.found["skipped"].append(name)
            return None
        started = perf_counter()
        try:
            result = work()
        except Exception as error:  # whatever a device raises
            self.fail(name, one_line(error))
            return None
        if result is not None:
            self.found[name] = result
        click.echo(
            f"{name}: {'done' if result is None else _words(result)} ({perf_counter() - started:.0f} s)"
        )
        return result

    def fail(self, name: str, reason: str) -> None:
        click.echo(f"{name}: FAILED: {reason}")
        self.found["failed"].append(f"{name}: {reason}")

    def finish(self) -> int:
        """The last line; the exit code."""
        click.echo(json.dumps(self.found))
        return 1 if self.found["failed"] else 0


@click.command(help=__doc__)
@click.option("--budget", default=480, type=click.IntRange(30), help="Seconds after which it ends, 480.")
@click.option("--tests/--no-tests", default=True, help="Run the contract suite, where it is there.")
def main(budget: int, tests: bool) -> None:
    checks = Checks(budget)
    watchdog = threading.Timer(budget, _give_up, [checks])
    watchdog.daemon = True
    watchdog.start()
    try:
        on_gpu = _select(checks)
        checks.section("kernel", lambda: _kernel(checks, on_gpu))
        if on_gpu and tests:
            checks.section("contract", lambda: _contract(checks))
        _speed(checks, on_gpu)
    finally:
        watchdog.cancel()
    sys.exit(checks.finish())


def _give_up(checks: Checks) -> None:
    """A device that hangs can only be left."""
    checks.fail("time", "the budget is used up")
    code = checks.finish()
    sys.stdout.flush()
    os._exit(code)


def _select(checks: Checks) -> bool:
    import torch

    on_gpu = bool(torch.cuda.is_available())
    if not on_gpu:
        click.echo(NO_GPU)
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    checks.found["device"] = device_runs.facts()
    checks.found["cuda"] = on_gpu
    click.echo(_words(checks.found["device"]))
    return on_gpu


def _kernel(checks: Checks, on_gpu: bool) -> dict[str, str]:
    """Each kind of layer: "right", or why not."""
    outcomes = {}
    for kind in device_runs.KINDS if on_gpu else device_runs.KINDS[:1]:
        try:
            reason = device_runs.kernel_difference(kind)
        except ModuleNotFoundError as error:
            return {"kernel": f"not checked: {error.name} is not installed"}
        outcomes[str(kind)] = reason or "right"
        if reason:
            checks.fail(f"kernel, {kind}", reason)
    return outcomes


def _contract(checks: Checks) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    if not (root / TESTS[0]).is_dir():
        return {"contract": "not run: the tests are not in the package, only in the repository"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda or kernel", *TESTS]
    limit = max(ROOM, checks.left / 2)  # the other half is for speed
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        checks.fail("contract", f"not through in {limit:.0f} s")
        return {"contract": "unfinished"}
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        checks.fail("contract", "; ".join([last, *failed[:5]]))
    return {"contract": last}


def _speed(checks: Checks, on_gpu: bool) -> None:
    ceiling = checks.section("bandwidth_gbps", device_runs.bandwidth) if on_gpu else None
    runs: list[dict[str, Any]] = []
    checks.found["runs"] = runs  # so that those that ended are told whatever happens
    checks.section("speed", lambda: device_runs.all_runs(on_gpu, lambda: checks.left, runs))
    if not on_gpu:
        _same_ids(checks, runs)
        return
    click.echo(device_runs.table(runs, ceiling))
    found = {(run["route"], run["streams"]): run for run in runs}
    one, many = (found.get((device_runs.ROUTES[0], streams)) for streams in device_runs.STREAMS)
    if one and ceiling:
        _target(checks, "bandwidth_fraction", one["gbps"] / ceiling, FRACTION_TARGET)
    if one and many:
        _target(checks, "batch_speedup", many["decode_tps"] / one["decode_tps"], BATCH_TARGET)


def _same_ids(checks: Checks, runs: list[dict[str, Any]]) -> None:
    """All that a CPU can show: float32 routes agree, whatever their speed."""
    for streams in device_runs.STREAMS:
        if len({run["ids"] for run in runs if run["streams"] == streams}) > 1:
            checks.fail("runs", f"the routes give different ids of {streams} streams")
    checks.found["runs"] = [{name: run[name] for name in ("route", "streams", "ids")} for run in runs]
    click.echo(NO_GPU)


def _target(checks: Checks, name: str, reached: float, wanted: float) -> None:
    checks.found[name] = reached
    click.echo(f"{name}: {reached:.2f}, wanted {wanted:g}: {'met' if reached >= wanted else 'MISSED'}")


def _words(result: Any) -> str:
    if isinstance(result, dict):
        return ", ".join(f"{name} {value}" for name, value in result.items())
    return f"{result:.4g}" if isinstance(result, float) else str(result)


if __name__ == "__main__":
    main()
