"""Exact products under the kernels that OpenBLAS has for other processors: no row's place may count."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Prints how many of the rows that stand alone round otherwise than among others: by ours, and by tiles of 16
# with the weight on the right.
CHILD = """
import numpy as np
from ferrum_mlx.backends.mlx.host_layers import TILE, matmul

rng = np.random.default_rng(1)
ours = other = 0
for n_in, n_out in [(576, 576), (576, 192), (1536, 576), (64, 258), (32, 32), (7, 3)]:
    x, w = (rng.standard_normal((n, n_in)).astype(np.float32) for n in (40, n_out))
    whole = matmul(x, w, exact=True)
    for row in range(40):
        ours += not np.array_equal(matmul(x[row : row + 1], w, exact=True)[0], whole[row])
    first = np.concatenate([x[12:13], x[1:TILE]]) @ w.T
    other += not np.array_equal(first[0], (x[:TILE] @ w.T)[12])
print(ours, other)
"""
BLAS = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]  # type: ignore[call-overload, index]
KERNELS = ["Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake"]


def counts(kernels: str) -> tuple[int, int]:
    env = os.environ | {"OPENBLAS_CORETYPE": kernels, "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=True)
    ours, other = map(int, child.stdout.split())
    return ours, other


@pytest.mark.skipif(
    platform.machine() != "x86_64" or "openblas" not in BLAS,
    reason=f"the kernels are OpenBLAS's for x86-64; here: {BLAS} on {platform.machine()}",
)
def test_a_row_rounds_alike_in_any_place_under_every_kernel() -> None:
    """OpenBLAS takes its own choice where the processor cannot run the kernels that are asked for."""
    found = {kernels: counts(kernels) for kernels in KERNELS}
    assert {kernels: ours for kernels, (ours, _) in found.items()} == dict.fromkeys(KERNELS, 0)
    if _has_avx2():  # negative control: there the other way round does not hold
        assert found["Haswell"][1] > 0


def _has_avx2() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " avx2 " in cpuinfo.read_text()
