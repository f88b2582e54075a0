"""Reads ahead in threads or processes, and copies to a device while the step computes.

Results arrive in order. The threads are those of ``torchdata.nodes``. An exception in a worker is
raised unchanged where its result is taken.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper, Prefetcher


class Reader:
    """Takes results from a stream that is opened when the first one is needed.

    Attributes:
        wait_seconds: How long the consumer has waited, over all results.
    """

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self._results: Generator[Any] | None = None

    def take(self, open_results: Callable[[], Generator[Any]]) -> Any:
        """Wait for the next result; after an exception the stream is closed."""
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
    work: Callable[[int], Any],
    numbers: Iterable[int],
    *,
    workers: int,
    processes: bool = False,
    copies: DeviceCopies | None = None,
) -> Generator[Any]:
    """Yield ``work(number)`` for each number, in order, computed ahead by workers.

    Closing the generator stops the workers and waits for them.

    Args:
        work: A function of a number; must pickle for processes.
        numbers: Its arguments; may be endless.
        workers: Number of threads; with 0 each result is computed on request.
        processes: Give each thread a process that computes for it.
        copies: Copies the results to a device, ahead of their use.
    """
    pool = _start_pool(work, workers) if processes else None
    # torchdata's threads set torch's number of threads to 1, and with it that of every thread that
    # has not read its own number yet. Reading it here keeps it for this thread.
    torch.get_num_threads()
    compute = _Guarded(work if pool is None else _Remote(pool))
    results: BaseNode[Any] = ParallelMapper(
        IterableWrapper(numbers), compute, num_workers=workers, snapshot_frequency=0
    )
    if copies is not None:
        results = Mapper(results, _Guarded(copies.start))
        if copies.ahead:
            results = Prefetcher(results, copies.ahead, snapshot_frequency=0)
    try:
        for result in results:
            if isinstance(result, _Raised):
                raise result.error
            yield result if copies is None else copies.finish(result)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        del results  # the last reference: the nodes join their threads when deleted
        if pool is not None:
            pool.shutdown(wait=True)


@attrs.frozen
class _Raised:
    """An exception as a result: torchdata would raise another one instead."""

    error: BaseException


@attrs.frozen
class _Guarded:
    work: Callable[[Any], Any]

    def __call__(self, given: Any) -> Any:
        try:
            return given if isinstance(given, _Raised) else self.work(given)
        except BaseException as error:
            return _Raised(error)


@attrs.frozen
class _Remote:
    pool: ProcessPoolExecutor

    def __call__(self, number: int) -> Any:
        return pickle.loads(self.pool.submit(_work_in_process, number).result())


def _start_pool(work: Callable[[int], Any], workers: int) -> ProcessPoolExecutor:
    # Not forks of this process: they would wait forever for locks that threads of torch or of a
    # process group held at that moment. The server that is forked has imported torch and started
    # nothing.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forgekit.data"])
    return ProcessPoolExecutor(workers, context, initializer=_start_process, initargs=(work,))


_work: Callable[[int], Any]  # of this worker process


def _start_process(work: Callable[[int], Any]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = work


def _work_in_process(number: int) -> bytes:
    # A plain pickle copies the tensors; shared memory would need a file handle for each.
    return pickle.dumps(_work(number), protocol=pickle.HIGHEST_PROTOCOL)


@attrs.frozen
class Copy:
    """A micro-batch on its device, and the event that marks the end of its copy."""

    batch: TensorDict
    done: torch.Event | None


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
        try:
            self._module: Any = torch.get_device_module(device)
        except RuntimeError:  # "meta" has no module
            self._module = None
        self._stream = self._module.Stream(device) if hasattr(self._module, "Stream") else None

    def start(self, batch: TensorDict) -> Copy:
        """Start the copy; to an accelerator from pinned memory and on a separate stream."""
        if self._stream is None:
            return Copy(batch.to(self.device), None)
        done = self._module.Event()
        pinned: dict[str, Any] = {key: tensor.pin_memory() for key, tensor in batch.items()}
        with self._module.stream(self._stream):
            copied = {key: p.to(self.device, non_blocking=True) for key, p in pinned.items()}
            done.record(self._stream)
        if self.note is not None and "doc_ids" in pinned:
            self.note(copied["doc_ids"], pinned["doc_ids"])
        return Copy(TensorDict(copied, batch.batch_size), done)

    def finish(self, copy: Copy) -> TensorDict:
        """Make the current stream wait for a copy, and keep its memory until the stream is done."""
        if copy.done is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(copy.done)
            tensors: Any = copy.batch.values()
            for tensor in tensors:
                tensor.record_stream(current)
        return copy.batch
