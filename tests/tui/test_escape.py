"""A lone Esc does not wait for Textual's next look at the clock."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time

CHILD = """
import inspect
from ferrum_tui.escape import ESC_DELAY, notice_escape, when_suspected
notice_escape()
from textual import constants
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver

reader = LinuxDriver.run_input_thread
print(constants.ESCAPE_DELAY == ESC_DELAY / 1000)
print(reader.__globals__["selectors"].SelectSelector.__module__)
print("selectors.SelectSelector()" in inspect.getsource(reader))
print("parser = XTermParser(" in inspect.getsource(reader))

told = []
for before in (None, lambda: told.append(chunk)):  # nobody may be there to be told
    if before:
        when_suspected(before)
    parser = linux_driver.XTermParser()
    for chunk in ("a", "\\x1b[A", "\\x1b", "[B", "\\x1b[27u", "b\\x1b"):
        list(parser.feed(chunk))
print(told == ["\\x1b", "\\x1b[27u", "b\\x1b"])
"""


def test_textual_takes_our_delay_and_our_selector() -> None:
    env = {name: value for name, value in os.environ.items() if name != "ESCDELAY"}
    child = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["True", "ferrum_tui.escape", "True", "True", "True"]


def test_the_wait_after_input_is_a_short_one() -> None:
    from ferrum_tui.escape import _Selector

    reading, writing = os.pipe()
    try:
        with _Selector() as ours:
            ours.register(reading, selectors.EVENT_READ)
            os.write(writing, b"\x1b")
            assert ours.select(5)
            os.read(reading, 1)
            began = time.monotonic()
            assert not ours.select(5)  # as Textual asks while nothing else comes
            assert time.monotonic() - began < 5
            assert not ours.select(0.01)  # and then its own waits again
            assert not ours._heard
    finally:
        os.close(reading)
        os.close(writing)
