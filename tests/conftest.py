"""Starts the pool from which tests fork ranks and recipes; workers of pytest-xdist share one."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pool
import pytest
from _pytest.doctest import DoctestModule

pytest.register_assert_rewrite("runs")  # here, before the first folder that imports it

LONG = (
    "distributed/test_oracle.py",
    "recipes",
    "chaos",
    "verification",
    "run/test_health.py",
    "distributed",
    "parallel",
    "steps",
    "plan",
    "checkpoints",
    "evaluation",
    "huggingface",
    "run",
)
"""What takes longest; a worker that got it last would keep the others waiting."""
_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Start the pool, and hear signals that a job in the background or under nohup would ignore.

    Its children inherit that.
    """
    # Compiled files are kept: else each worker would rewrite and compile all tests again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist share what it started
        pool.start()
    if config.getoption("numprocesses", None):
        return
    import torch

    config.pluginmanager.register(_Examples())  # for the package too, beside which this file is not
    torch.set_num_threads(1)


class _Examples:
    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Iterator[None]:
        """Look for examples only where there are some: a search takes as long as the import."""
        collectors = yield
        if file_path.suffix != ".py" or ">>>" in file_path.read_text():
            return collectors
        return [one for one in collectors if not isinstance(one, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without a search for garbage, and search later only among what tests make.

    What was imported and collected nearly all stays; to go through it takes a third of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers are given whole files in the order of the tests: first those that take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=_rank_of_file)


def _rank_of_file(item: pytest.Item) -> int:
    """Where a test's file stands in ``LONG``; behind all of it if it does not."""
    places = [at for at, place in enumerate(LONG) if item.path.is_relative_to(_HERE / place)]
    return min(places, default=len(LONG))


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run every test in an empty folder: commands of a user leave data and runs in the checkout."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("here")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind, which a later test's signal would meet."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "a signal handler was left behind"
