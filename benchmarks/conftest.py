"""One thread, and a way to show times that were taken in turns in pytest-benchmark's tables."""

from __future__ import annotations

import pytest
import ranks
import torch
from pairs import Times, machine

ranks.start()  # before torch computes anything in this process


def pytest_sessionfinish() -> None:
    ranks.stop()


class Tape:
    """A clock that moves only when a recorded time is played, and then by that time."""

    __name__ = "tape"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Read the clock."""
        return self.now

    def play(self, seconds: float) -> None:
        """Let that many seconds pass."""
        self.now += seconds


TAPE = Tape()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=TAPE))
        item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Ratios of single-threaded code depend least on what else runs; yields the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield before
    torch.set_num_threads(before)


@pytest.fixture
def show(benchmark):
    """``show(group, times, name, **extra)``: fill an entry's row with the times measured for it.

    pytest-benchmark runs one entry after the other. Entries here were measured in turns before,
    by one fixture for the whole group, and are played back.
    """

    def show(group: str, times: Times, name: str, **extra: object) -> None:
        benchmark.group = group
        recorded = iter(times[name])
        benchmark.extra_info.update(machine() | extra)
        benchmark.pedantic(
            TAPE.play, setup=lambda: ((next(recorded),), {}), rounds=len(times[name])
        )

    return show
