"""Work on numbers in threads or processes, results in order, stopped for certain.

The threads are those of ``torchdata.nodes``. What a worker raises comes out of ``take`` as it is.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs
import torch
from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper, Prefetcher

from forgekit.data.loading.device_prefetch import Transfer

__all__ = ["Stream"]


@attrs.frozen
class _Raised:
    """An exception as a result: torchdata would replace it by one of another message."""

    error: BaseException


class Stream:
    """``work(number)`` for each number, in order, computed ahead by workers.

    Args:
        work: A function of a number; has to pickle for processes.
        numbers: What it is called with; may be endless.
        workers: Threads; with 0 ``take`` computes.
        processes: Give each thread a process that computes for it.
        transfer: Where the results go to, each while the one before is in use.
    """

    def __init__(
        self,
        work: Callable[[int], Any],
        numbers: Iterable[int],
        *,
        workers: int,
        processes: bool,
        transfer: Transfer | None = None,
    ) -> None:
        self._transfer = transfer
        self._pool = _pool(work, workers) if processes else None
        # torchdata's threads set the number of torch's threads to 1, also for every thread that has
        # not asked for its own number yet. Asking settles it for this one.
        torch.get_num_threads()
        results: BaseNode[Any] = ParallelMapper(
            IterableWrapper(numbers),
            _Guarded(work if self._pool is None else _Remote(self._pool)),
            num_workers=workers,
            snapshot_frequency=0,
        )
        if transfer is not None:
            results = Mapper(results, _Sending(transfer))
            if transfer.ahead:
                results = Prefetcher(results, transfer.ahead, snapshot_frequency=0)
        self._results: BaseNode[Any] | None = results

    def take(self) -> Any:
        """Wait for the next result, or raise what its worker raised."""
        if self._results is None:
            raise RuntimeError("this stream was closed; open another one.")
        result = next(self._results)
        if isinstance(result, _Raised):
            raise result.error
        return result if self._transfer is None else self._transfer.receive(result)

    def close(self) -> None:
        """Stop the workers and wait for them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        # Nothing else refers to the mapper, so it goes here, and joins its threads as it goes.
        self._results = None
        if self._pool is not None:
            self._pool.shutdown(wait=True)


@attrs.frozen
class _Guarded:
    work: Callable[[Any], Any]

    def __call__(self, given: Any) -> Any:
        try:
            return self.work(given)
        except BaseException as error:
            return _Raised(error)


@attrs.frozen
class _Sending:
    transfer: Transfer

    def __call__(self, result: Any) -> Any:
        if isinstance(result, _Raised):
            return result
        return _Guarded(self.transfer.send)(result)


@attrs.frozen
class _Remote:
    pool: ProcessPoolExecutor

    def __call__(self, number: int) -> Any:
        return pickle.loads(self.pool.submit(_in_process, number).result())


def _pool(work: Callable[[int], Any], workers: int) -> ProcessPoolExecutor:
    # Not fork: threads of torch and of the collectives may hold locks that a copy never frees.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(work,))


_work: Callable[[int], Any]


def _prepare(work: Callable[[int], Any]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = work


def _in_process(number: int) -> bytes:
    # Plain pickles copy the tensors; sharing their memory would use up file handles.
    return pickle.dumps(_work(number), protocol=pickle.HIGHEST_PROTOCOL)
