"""One thread, and a way to show times that were taken in turns in pytest-benchmark's tables."""

from __future__ import annotations

from collections.abc import Callable

import pool
import pytest
import torch
from pairs import Times, machine
from rich.console import Console
from rich.table import Table

pool.start()


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


COUNTED = pytest.StashKey[list[tuple[str, ...]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNTED] = []


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print what was counted above what was timed."""
    if not config.stash[COUNTED]:
        return
    table = Table(title="What a step costs, counted")
    for column in ("what", "bare loop", "forgekit", "target"):
        table.add_column(column, justify="left" if column in ("what", "target") else "right")
    for cells in config.stash[COUNTED]:
        table.add_row(*cells)
    Console(width=110).print(table)


@pytest.fixture
def row(request) -> Callable[..., None]:
    """``row(what, bare, ours, target)``: note a line for the table of what is counted."""

    def note(what: str, bare: object, ours: object, target: str = "") -> None:
        shown = (
            f"{n:,.2f}" if isinstance(n, float) else f"{n:,}" if n != "" else ""
            for n in (bare, ours)
        )
        request.config.stash[COUNTED].append((what, *shown, target))

    return note


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
