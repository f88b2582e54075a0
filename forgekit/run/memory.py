"""Memory: a snapshot when a device runs out, and garbage collection at known steps.

Python collects cyclic garbage whenever enough objects have been made, which is at another step on
each rank, and all ranks wait for the one that collects. ``periodic_collection`` does it at the same
step everywhere. ``report_out_of_memory`` writes down what filled a device when it ran out.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from forgekit.checks import check_integers

_log = logging.getLogger("forgekit")


@contextmanager
def periodic_collection(every: int) -> Iterator[Callable[[int], bool]]:
    """Collect cyclic garbage every ``every`` steps only.

    The first collection is a full one; what survives (modules, the model) is frozen, so that later
    ones look only at objects made since. In the end nothing is frozen, and Python's own collection
    is as before, whatever is raised.

    Args:
        every: Steps between two collections; 0 leaves Python's own collection on.

    Yields:
        ``collect(step) -> bool``, to be called once per step with the same steps on every rank; it
        says whether it collected.

    Raises:
        ValueError: If ``every`` is negative.

    Examples:
        >>> with periodic_collection(2) as collect:
        ...     [collect(step) for step in (1, 2, 3, 4)], gc.isenabled()
        ([False, True, False, True], False)
    """
    check_integers(collect_every=(every, 0))
    if every == 0:
        yield lambda _step: False
        return
    is_frozen = False

    def collect(step: int) -> bool:
        nonlocal is_frozen
        if step % every:
            return False
        gc.collect()
        if not is_frozen:
            gc.freeze()
            is_frozen = True
        return True

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield collect
    finally:
        if is_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def report_out_of_memory(out: str | os.PathLike[str], *, rank: int = 0) -> Iterator[None]:
    """Write torch's allocator snapshot when a device runs out of memory, and re-raise.

    ``out/memory/rank_0.pickle`` (for https://pytorch.org/memory_viz) is taken while the error still
    holds the local variables of each frame that it came through. It shows how the blocks came to be
    where ``torch.cuda.memory._record_memory_history()`` was called before.

    Args:
        out: The run directory.
        rank: Names the files.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        if torch.cuda.is_available():
            path = Path(out) / "memory" / f"rank_{rank}.pickle"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
                _log.error("out of memory; what filled it is in %s", path)
            except (OSError, RuntimeError) as failure:  # must not hide the out-of-memory error
                _log.error("out of memory, and no snapshot of it: %s", failure)
        raise
