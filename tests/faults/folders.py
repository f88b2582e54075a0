"""A folder that all ranks of a check see."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder, removed once every rank has left it."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        try:
            yield Path(names[0])
        finally:
            dist.barrier()


def by_rank_0(function: Callable[..., Any], *args: Any) -> None:
    """Call a function on one rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()
