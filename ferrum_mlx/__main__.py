"""`python -m ferrum_mlx` is the command `ferrum-mlx`."""

from ferrum_mlx.cli.main import main

main()
