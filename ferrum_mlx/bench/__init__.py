"""Benchmarks, under the product's own settings of threads."""

from ferrum_mlx import threads  # noqa: F401 - before anything here loads an array library
