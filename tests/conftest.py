"""Starts the pool of ranks before torch computes anything in this process.

What is imported before, its workers need not import again.
"""

from __future__ import annotations

import ranks
import torch
import torch._dynamo
import torch.distributed.fsdp

import forgekit  # noqa: F401

ranks.start()
torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    ranks.stop()
