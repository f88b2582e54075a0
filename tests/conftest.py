"""Starts the pool of ranks before torch computes anything in this process."""

from __future__ import annotations

import ranks
import torch
import torch.distributed.fsdp

ranks.start()
torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    ranks.stop()
