"""When the halves of two steps reach the device: a write that finds a reader copies its pool."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from ferrum_mlx.backends.mlx.halves import Halves, Parts

NUMBERS = 1 << 23  # of a pool, 32 MiB: reading it takes longer than building a step
POOL = 4 * NUMBERS


class Pools:
    """Two layers: each writes its pool, then reads all of it."""

    def __init__(self) -> None:
        self.arrays = [mx.zeros((NUMBERS,)) for _ in range(2)]
        mx.eval(self.arrays)

    def step(self, number: int) -> tuple[mx.array, mx.array]:
        """The first layer's result, and the second's."""
        total = mx.array(float(number))
        results = []
        for pool in self.arrays:
            pool[mx.array([number])] = total[None]
            total = pool.sum()
            for _ in range(20):  # what lies between a read and the next layer
                total = total * 0.5
            results.append(total)
        return results[0], results[1]


Start = Callable[[Parts], None]


def peak(start: Start, landed: Callable[[], None]) -> tuple[int, list[float]]:
    """The most bytes that steps ahead take, and their results."""
    pools, said = Pools(), []
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    flights: list[mx.array] = []
    for number in range(6):
        middle, last = pools.step(number)
        start(Parts(middle, pools.arrays[:1], [last, pools.arrays[1]]))
        flights.append(last)
        if len(flights) == 2:
            said.append(flights.pop(0).item())
            landed()
    said.append(flights.pop().item())
    return mx.get_peak_memory() - before, said


def _whole(parts: Parts) -> None:
    mx.async_eval(parts.middle, *parts.first, *parts.rest)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()


def test_a_half_starts_when_the_half_before_last_is_done() -> None:
    halves = Halves()
    in_halves, said = peak(halves.start, halves.landed)
    assert in_halves < POOL / 2
    wholes = [peak(_whole, lambda: None) for _ in range(5)]  # on a busy core a read may be over in time
    assert [said] * 5 == [same for _, same in wholes]
    assert max(most for most, _ in wholes) >= POOL


def test_a_step_that_cannot_be_cut_goes_whole_and_one_after_a_failure_is_the_first() -> None:
    halves = Halves()
    a, b, c = (mx.array(float(n)) + 1 for n in range(3))
    halves.start(Parts(None, [a], []))
    assert not halves.cut
    halves.start(Parts(b, [], [b + 1]))  # the one before it has no middle to wait for
    assert halves.cut
    halves.reset()
    assert not halves.cut
    rest = c * 2
    halves.start(Parts(c, [], [rest]))
    assert rest.item() == 6
