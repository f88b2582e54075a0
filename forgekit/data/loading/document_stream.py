"""Documents as a stream of micro-batches, without token files: for data that is never on this disk.

A stream stands where a loader stands in a recipe. It cannot be divided anew among other ranks, so
its position belongs to its rank, and resuming on another number of ranks is refused. Data that fits
on a disk is better prepared: token files shuffle, pack, and resume on any number of ranks.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
from tensordict import TensorDict
from torch.utils.data import get_worker_info

from forgekit.data.corpus.tokenizer import END_OF_TEXT, token_id
from forgekit.data.documents.protocol import Documents, as_documents
from forgekit.data.loading.batch_size import count_micro_batches
from forgekit.data.loading.document_rows import Cursor, Rows
from forgekit.data.loading.workers import Stream
from forgekit.inputs import brief, check_integers, is_integer
from forgekit.terminal import printable

__all__ = ["DocumentStream", "stream_documents"]

BROKEN_NAMED = 10

log = logging.getLogger("forgekit")


def stream_documents(
    documents: Documents | Iterable[Any],
    seq_len: int = 1024,
    batch_size: int = 8,
    *,
    tokenizer: Any = None,
    eos_id: int | None = None,
    rank: int = 0,
    world: int = 1,
    epochs: int | None = None,
    workers: Literal[0, 1] = 0,
    transforms: Sequence[Callable[[TensorDict], TensorDict]] = (),
) -> DocumentStream:
    """Stream documents as one data-parallel rank's micro-batches, in their own order.

    Rows hold tokens of successive documents, each closed by ``eos_id``; a document goes on in the
    next row. ``doc_ids`` and ``position_ids`` keep documents apart, and no label crosses from one
    into the next. Every token that follows another one of its document is a target once per epoch.

    The stream goes where a loader goes, into ``forgekit.groups``. Keep it in a field of the state,
    and checkpoints keep its position, each rank its own::

        @attrs.frozen(kw_only=True, slots=True, eq=False)
        class State(fk.TrainState):
            stream: fk.DocumentStream = attrs.field(repr=False)

    Args:
        documents: What ``text_documents``, ``huggingface_documents``, ``token_documents`` or
            ``random_documents`` returns, or a list of texts or arrays.
        seq_len: Places in a row.
        batch_size: Rows per rank and micro-batch.
        tokenizer: Encodes texts: what ``load_tokenizer`` returns. None for token ids.
        eos_id: The id that closes a document; of a tokenizer trained here it is known.
        rank: This data-parallel rank. The ranks share the documents; none is read twice, also not
            in the workers of torch's ``DataLoader``.
        world: Number of data-parallel ranks.
        epochs: None goes on for ever. A number ends after that many, the last rows filled with
            padding; ranks then end after different steps, see ``DataEnd``.
        workers: 1 reads ahead in a thread. The batches are the same.
        transforms: Functions of a micro-batch that return one, applied in this order.

    Returns:
        A stream, to be used in ``for``; it has ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: If ``documents`` can be read only once.
        ValueError: If a number is out of range, or the closing id is unknown.

    Examples:
        >>> stream = stream_documents([[1, 2, 3], [4, 5]], 4, 1, eos_id=0, epochs=1)
        >>> for batch in stream:
        ...     print(batch["input_ids"].tolist(), batch["labels"].tolist())
        [[1, 2, 3, 0]] [[2, 3, 0, -100]]
        [[4, 5, 0, 0]] [[5, 0, -100, -100]]
    """
    _check_numbers(seq_len, batch_size, rank, world, epochs, workers)
    if tokenizer is not None and not hasattr(tokenizer, "encode_batch_fast"):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; pass what forgekit.load_tokenizer(path) "
            "returns, or the backend_tokenizer of one of Hugging Face."
        )
    if eos_id is None:
        if tokenizer is None:
            raise ValueError("eos_id is missing; token ids without a tokenizer need one.")
        eos_id = token_id(tokenizer, END_OF_TEXT)
    if not is_integer(eos_id) or not 0 <= eos_id < 2**32:
        raise ValueError(f"eos_id {brief(eos_id)} must be a token id, an integer of at least 0.")
    rows = Rows(
        documents=as_documents(documents),
        tokenizer=tokenizer,
        eos_id=eos_id,
        seq_len=seq_len,
        batch_size=batch_size,
        epochs=epochs,
        transforms=tuple(transforms),
        warn=_Warn(),
    )
    return DocumentStream(rows, rank, world, workers)


class DocumentStream:
    """One rank's micro-batches out of documents; ``stream_documents`` makes one.

    It has one position: a second ``for`` goes on where the first one stopped. Close it, or use it
    in ``with``, to stop its thread early.

    Attributes:
        wait_seconds: How long the consumer has been kept waiting, over all micro-batches.
        fingerprint: Names the documents, as their source does.
    """

    def __init__(self, rows: Rows, rank: int, world: int, workers: int) -> None:
        self.wait_seconds = 0.0
        self.fingerprint = rows.documents.fingerprint  # looks at every file, so only once
        self._rows = rows
        self._rank = rank
        self._world = world
        self._workers = workers
        self._cursor = Cursor()
        self._take: Callable[[], tuple[TensorDict, Cursor] | None] | None = None
        self._close: Callable[[], object] = _nothing

    def micro_batches(self, global_batch_size: int) -> int:
        """Count the micro-batches per optimizer step; see ``Loader.micro_batches``."""
        return count_micro_batches(global_batch_size, self._rows.batch_size, self._world)

    @property
    def world(self) -> int:
        """Number of data-parallel ranks that share the documents."""
        return self._world

    def padding(self) -> TensorDict:
        """Make a micro-batch without a document, for a rank that has none."""
        return self._rows.padding()

    @property
    def samples(self) -> int:
        """Rows that all ranks have consumed, padding left out, after the last micro-batch."""
        return self._cursor.rows * self._world

    @property
    def broken(self) -> int:
        """Documents that this rank has left out because they could not be read."""
        return self._cursor.broken

    @property
    def epoch(self) -> int:
        """How often this rank has read its documents to their end."""
        return self._cursor.epoch

    @property
    def is_endless(self) -> bool:
        """Whether it goes on epoch after epoch."""
        return self._rows.epochs is None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last micro-batch, in JSON values."""
        worker, workers = _worker()
        return {
            "fingerprint": self.fingerprint,
            "rank": self._rank,
            "world": self._world,
            "worker": worker,
            "workers": workers,
            **attrs.asdict(self._cursor),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, exactly.

        Raises:
            ValueError: If it is that of another rank, of another number of ranks or workers, or in
                other documents.
        """
        now = self.state_dict()
        if state["fingerprint"] != now["fingerprint"]:
            raise ValueError(
                f"the stream's position lies in other documents: {state['fingerprint']!r}, and now "
                f"they are {now['fingerprint']!r}. Stream the same ones, or start a new run."
            )
        shares = ("rank", "world", "worker", "workers")
        if any(state[name] != now[name] for name in shares):
            raise ValueError(
                f"the stream's position is that of {_reader(state)}, and this is {_reader(now)}. "
                "Documents that are half read cannot be divided anew without repeating or skipping "
                "some. Resume on as many ranks and workers, or prepare token files, which resume "
                "on any number."
            )
        self.close()
        self._cursor = Cursor(**{name: state[name] for name in attrs.asdict(self._cursor)})

    def __iter__(self) -> Iterator[TensorDict]:
        while (batch := self._next()) is not None:
            yield batch

    def __enter__(self) -> DocumentStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread. Iterating again goes on from the same position."""
        self._take = None
        self._close()
        self._close = _nothing

    def _next(self) -> TensorDict | None:
        began = time.perf_counter()
        try:
            if self._take is None:
                self._take = self._open()
            taken = self._take()
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began
        if taken is None:
            self.close()
            return None
        batch, self._cursor = taken
        return batch

    def _open(self) -> Callable[[], tuple[TensorDict, Cursor] | None]:
        worker, workers = _worker()
        part, parts = self._rank * workers + worker, self._world * workers
        batches = self._rows.read(self._cursor, part, parts)
        if not self._workers:
            return lambda: next(batches, None)
        ahead = Stream(lambda _: next(batches, None), itertools.count(), workers=1, processes=False)
        # Also at the interpreter's exit, before it takes the modules apart under the thread.
        self._close = weakref.finalize(self, ahead.close)
        return ahead.take


class _Warn:
    """Names the first broken documents in the log."""

    def __init__(self) -> None:
        self._left = BROKEN_NAMED

    def __call__(self, problem: str) -> None:
        if self._left:
            self._left -= 1
            log.warning("left out: %s", printable(problem))


def _nothing() -> None:
    pass


def _worker() -> tuple[int, int]:
    """Number of this worker of torch's DataLoader, and of workers; one of one elsewhere."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _reader(state: dict[str, Any]) -> str:
    worker = f", worker {state['worker']} of {state['workers']}" if state["workers"] > 1 else ""
    return f"rank {state['rank']} of {state['world']}{worker}"


def _check_numbers(
    seq_len: int, batch_size: int, rank: int, world: int, epochs: int | None, workers: int
) -> None:
    anything = -(2**63)
    check_integers(rank=(rank, anything), world=(world, anything), workers=(workers, anything))
    if not 0 <= rank < world:
        raise ValueError(
            f"rank {rank} must lie in range(world={world}). "
            "rank, world = forgekit.data_ranks(mesh) gives both."
        )
    check_integers(
        seq_len=(seq_len, 1, 2**31),
        batch_size=(batch_size, 1, 2**31),
        epochs=(1 if epochs is None else epochs, 1),
    )
    if workers not in (0, 1):
        raise ValueError(f"workers {workers} must be 0 or 1: documents are read in their order.")
