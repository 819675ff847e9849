"""A benchmark on the screen while it runs."""
