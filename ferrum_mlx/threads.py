"""How long the threads of array libraries wait by spinning: set here before the libraries load.

OpenBLAS, in numpy's wheel, spins for 2^26 cycles after a product by default, and starves a busy machine,
this engine included; 2^20 cycles span the gap to the next product of the same forward. libgomp, which
torch's wheels for Linux multiply with, is the same: short of its default, on a quiet machine a thousand
turns keep most of the speed, on a busy one they lose the least. bench/NOTES.md has the figures.
"""

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
