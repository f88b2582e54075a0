"""Read-ahead: results computed by threads or processes, and copied to a device.

Threads of ``torchdata.nodes`` or processes compute, and a copy to the device runs while the step
computes. Results arrive in order; a worker's exception is raised unchanged in its result's place.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, TypeAlias

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper, Prefetcher

from forgekit.environment import end_with_parent

Copy: TypeAlias = tuple[TensorDict, "torch.Event | None"]
"""A micro-batch on its device, and the event that marks the end of its copy."""


class Reader:
    """Takes results from a stream, which is opened on first use.

    Attributes:
        wait_seconds: How long the consumer has waited, over all results.
    """

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self._results: Generator[Any] | None = None

    def take(self, open_results: Callable[[], Generator[Any]]) -> Any:
        """Wait for the next result; an exception closes the stream."""
        began = time.perf_counter()
        try:
            if self._results is None:
                self._results = open_results()
                # Also at exit: threads must end before the interpreter clears the modules.
                self._close = weakref.finalize(self, self._results.close)
            return next(self._results)
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stop the workers and wait for them."""
        if self._results is not None:
            self._close()
            self._results = None


def compute_ahead(
    work: Callable[[Any], Any],
    items: Iterable[Any],
    *,
    workers: int,
    processes: bool = False,
    copies: DeviceCopies | None = None,
    spared: Sequence[signal.Signals] = (),
) -> Generator[Any]:
    """Yield ``work(item)`` for each item, in order, computed ahead by workers.

    Closing the generator stops the workers and waits for them.

    Args:
        work: A function of an item; must pickle for processes, as items must.
        items: Its arguments; may be endless. Read in another thread if there are workers.
        workers: Number of threads; with 0 each result is computed on request.
        processes: Give each thread a process that computes for it.
        copies: Copies the results to a device, ahead of their use.
        spared: Signals that processes do not take: those of the first call in this process count.
    """
    pool = _start_pool(work, workers, spared) if processes else None
    # torchdata's threads set torch's number of threads to 1, and with it that of every thread that
    # has not read its own number yet. Reading it here keeps it for this thread.
    torch.get_num_threads()
    compute = work if pool is None else partial(_compute_in, pool)
    results: BaseNode[Any] = ParallelMapper(
        IterableWrapper(_guarded(items)),
        partial(_attempt, compute),
        num_workers=workers,
        snapshot_frequency=0,
    )
    if copies is not None:
        results = Mapper(results, partial(_attempt, copies.start))
        if copies.ahead:
            results = Prefetcher(results, copies.ahead, snapshot_frequency=0)
    try:
        for result in results:
            if isinstance(result, _Raised):
                raise result.error
            yield result if copies is None else copies.finish(result)
    except RuntimeError as error:
        # A signal handler that raises while torchdata's queue is polled leaves its lock
        # released; `with` then raises about that instead of the handler's exception.
        if str(error) == "release unlocked lock" and error.__context__ is not None:
            raise error.__context__ from None
        raise
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        del results  # the last reference: the nodes join their threads when deleted
        if pool is not None:
            pool.shutdown(wait=True)


@attrs.frozen
class _Raised:
    """A worker's exception as a result: torchdata would replace it by another."""

    error: BaseException


def _guarded(items: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from items
    except (Exception, KeyboardInterrupt) as error:
        yield _Raised(error)


def _attempt(work: Callable[[Any], Any], given: Any) -> Any:
    try:
        return given if isinstance(given, _Raised) else work(given)
    except BaseException as error:
        return _Raised(error)


def _compute_in(pool: ProcessPoolExecutor, item: Any) -> Any:
    return pickle.loads(pool.submit(_work_in_process, item).result())


def _start_pool(
    work: Callable[[Any], Any], workers: int, spared: Sequence[signal.Signals]
) -> ProcessPoolExecutor:
    # Not forks of this process: they would wait forever for locks that threads of torch or of a
    # process group held at that moment. The server that is forked has imported torch and started
    # nothing.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forgekit.data"])
    # Workers inherit the signal mask.
    resource_tracker.ensure_running()  # which leaves SIGINT unblocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, spared)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ProcessPoolExecutor(workers, context, initializer=_start_process, initargs=(work,))


_work: Callable[[Any], Any]  # of this worker process


def _start_process(work: Callable[[Any], Any]) -> None:
    global _work
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work = work
    threading.Thread(target=end_with_parent, daemon=True).start()


def _work_in_process(item: Any) -> bytes:
    # A plain pickle copies tensors; shared memory would need a file handle for each.
    return pickle.dumps(_work(item), protocol=pickle.HIGHEST_PROTOCOL)


class DeviceCopies:
    """Copies micro-batches to a device.

    ``start`` runs in a thread that reads ahead, ``finish`` in the consumer's. Only pinning blocks
    the host, in the thread that reads ahead.

    Attributes:
        device: The device.
        ahead: Most micro-batches on the device before they are requested.
        note: Told of each copy of document ids: ``note(there, here)``.
    """

    def __init__(
        self, device: torch.device, ahead: int, note: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        self.device, self.ahead, self.note = device, ahead, note
        self._module: Any = getattr(torch, device.type, None)  # "meta" has no module
        self._stream = self._module.Stream(device) if hasattr(self._module, "Stream") else None

    def start(self, batch: TensorDict) -> Copy:
        """Start the copy; to an accelerator it goes from pinned memory on a separate stream."""
        if self._stream is None:
            return batch.to(self.device), None
        done = self._module.Event()
        pinned: dict[str, Any] = {key: tensor.pin_memory() for key, tensor in batch.items()}
        with self._module.stream(self._stream):
            copied = {key: p.to(self.device, non_blocking=True) for key, p in pinned.items()}
            done.record(self._stream)
        if self.note is not None and "doc_ids" in pinned:
            self.note(copied["doc_ids"], pinned["doc_ids"])
        return TensorDict(copied, batch.batch_size), done

    def finish(self, copy: Copy) -> TensorDict:
        """Make the current stream wait for a copy; its memory stays until the stream is done."""
        batch, done = copy
        if done is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(done)
            tensors: Any = batch.values()
            for tensor in tensors:
                tensor.record_stream(current)
        return batch
