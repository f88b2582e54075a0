"""Starts the pool of ranks before torch computes anything in this process.

What is imported before, its workers need not import again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
import torch._dynamo
import torch.distributed.fsdp

import forgekit  # noqa: F401

pytest.register_assert_rewrite("runs")  # here, before the first folder that imports it
ranks.start()
torch.set_num_threads(1)

MARK = "bad_input"
_HERE = Path(__file__).parent
_found = pytest.StashKey[list[str] | None]()


def pytest_sessionfinish() -> None:
    ranks.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note the bad inputs before -m and -k leave some out; None if not all files were read."""
    is_whole = set(_HERE.rglob("test_*.py")) <= {item.path for item in items}
    named = any("::" in argument for argument in config.args)
    marked = [item.nodeid for item in items if item.get_closest_marker(MARK)]
    config.stash[_found] = marked if is_whole and not named else None


@pytest.fixture(scope="session")
def bad_inputs(pytestconfig: pytest.Config) -> list[str]:
    """Names of all tests that are marked, also where only some tests were asked for."""
    found = pytestconfig.stash[_found]
    return _collected(pytestconfig.rootpath) if found is None else found


def _collected(root: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARK, str(_HERE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    wanted = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert done.returncode in wanted, f"the tests cannot be collected:\n{done.stdout[-2000:]}"
    return [line for line in done.stdout.splitlines() if "::" in line]
