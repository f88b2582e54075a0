"""Host and device memory: a report when it runs out, and garbage collection at known steps.

Python collects cyclic garbage whenever enough objects have been made, which is at another step on
each rank, and all ranks wait for the one that collects. ``periodic_collection`` does it at the same
step everywhere. ``report_out_of_memory`` writes down what filled the memory when it ran out.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.checks import check_integers

GIB = 2.0**30
LINES = 40
_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of torch's error when host memory runs out; it has no class of its own."""

_log = logging.getLogger("forgekit")


@attrs.frozen(order=True)
class LiveTensors:
    """Tensors of one kind that Python holds.

    Attributes:
        bytes: Of their storages, each storage counted once.
        count: How many there are; views of a storage that was counted already are counted here.
        shape: Their shape.
        dtype: Their dtype.
        device: Their device.
    """

    bytes: int
    count: int
    shape: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        kind = f"{self.dtype} {list(self.shape)} on {self.device}"
        return f"{self.bytes / GIB:9.4f} GiB  {self.count:6d} x {kind}"


@contextmanager
def periodic_collection(every: int) -> Iterator[Callable[[int], bool]]:
    """Collect cyclic garbage every ``every`` steps and at no other time.

    The first collection is a full one; what it leaves (modules, the model) is frozen, so that later
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
    """Write down what fills the memory when it runs out; the error goes on unchanged.

    ``out/memory/rank_0.txt`` lists the largest tensors that Python holds, by kind, and the resident
    memory; tensors that only a graph of autograd holds are not listed. On CUDA there is also a
    snapshot of the allocator, ``rank_0.pickle`` (for https://pytorch.org/memory_viz), taken while
    the error still holds the local variables of each frame that it came through; it shows how the
    blocks came to be where ``fk.run.Profile`` kept the history.

    Args:
        out: The run directory.
        rank: Names the files.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_full = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if is_full or _CPU_ALLOCATOR in str(error):
            _write_report(Path(out) / "memory" / f"rank_{rank}.txt", error)
        raise


def live_tensors() -> list[LiveTensors]:
    """Count the tensors that Python holds, largest first.

    Views share a storage, which is counted once, for the tensor that is found first. A DTensor
    counts by its local part. Objects frozen by ``gc.freeze`` are not seen.
    """
    sizes: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    storages: set[tuple[str, int]] = set()
    for tensor in _tensors():
        kind = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device))
        storage = tensor.untyped_storage()
        key = (kind[-1], storage.data_ptr())  # two devices may use the same address
        counts[kind] += 1
        sizes[kind] += 0 if key in storages else storage.nbytes()
        storages.add(key)
    live = [LiveTensors(sizes[kind], count, *kind) for kind, count in counts.items()]
    return sorted(live, reverse=True)


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM now; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _tensors() -> Iterator[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn when they are looked at
        for candidate in gc.get_objects():
            # By its type: a proxy would answer for what it stands for.
            kind = type(candidate)
            if issubclass(kind, Tensor) and not issubclass(kind, DTensor):
                try:
                    candidate.untyped_storage().data_ptr()
                except (RuntimeError, NotImplementedError):
                    continue  # no storage of its own: fake, meta or sparse
                yield candidate


def _write_report(path: Path, error: BaseException) -> None:
    """Write the text report; that it cannot be written must not hide the error itself."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_report(error))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
        _log.error("out of memory; what filled it is in %s", path)
    except (OSError, RuntimeError, MemoryError) as failure:
        _log.error("out of memory, and no report of it: %s", failure)


def _report(error: BaseException) -> str:
    kinds = live_tensors()
    total = sum(kind.bytes for kind in kinds)
    lines = [
        f"{type(error).__name__}: {error}",
        "",
        f"resident memory: {resident_bytes() / GIB:.4f} GiB",
        f"tensors that Python holds: {total / GIB:.4f} GiB, "
        f"{sum(kind.count for kind in kinds)} of {len(kinds)} kinds",
        *map(str, kinds[:LINES]),
    ]
    if torch.cuda.is_available():
        lines += ["", torch.cuda.memory_summary()]
    return "\n".join([*lines, ""])
