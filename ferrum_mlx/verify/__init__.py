"""Exactness checks on the user's own machine and model: the whole of `ferrum-mlx verify` but its command."""
