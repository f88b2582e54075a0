"""Starts the pool of ranks before torch computes anything in this process.

What is imported before, its workers need not import again.
"""

from __future__ import annotations

import pytest
import ranks
import torch
import torch._dynamo
import torch.distributed.fsdp

import forgekit  # noqa: F401

ranks.start()
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Let tests that share a fixture run in one process: a file, or a layout of the oracle."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        layout = getattr(params.get("cell"), "layout", "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path}{layout}"))


def pytest_sessionfinish() -> None:
    ranks.stop()
