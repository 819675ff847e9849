"""The terminal UI, installed as `ferrum_tui`."""
