"""The program, and on SIGUSR1 the names of what it has imported: `python -m ferrum_tui.probe FILE chat`.

A look at its memory would show libraries of machine code alone, not transformers, which is pure Python.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from ferrum_mlx.cli.main import main


def _write_on_signal(file: Path) -> None:
    def write(*_: object) -> None:
        aside = file.with_suffix(".new")
        aside.write_text("\n".join(sorted(sys.modules)))
        os.replace(aside, file)

    signal.signal(signal.SIGUSR1, write)


if __name__ == "__main__":
    _write_on_signal(Path(sys.argv.pop(1)))
    main()
