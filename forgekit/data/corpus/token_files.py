"""Token files: a directory of binary shards with an index, written whole and read by memory map.

Nothing in it is guessed. Each binary file says what it is, which integers it holds and how many, so
that a truncated or foreign file is refused instead of trained on. ``index.json`` names the shards
and keeps a fingerprint of the tokens; ``offsets.bin`` says where each document starts.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.atomic_directory import atomic_directory
from forgekit.data.corpus.number_files import check_numbers, map_numbers
from forgekit.data.corpus.token_index import INDEX, read_index, write_index
from forgekit.data.corpus.token_shards import OFFSET, OFFSETS_NAME, ShardWriter, shard_name
from forgekit.inputs import check_integers, path_of

__all__ = [
    "TokenFile",
    "TokenWriter",
    "is_token_file",
    "open_tokens",
    "write_tokens",
]


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike],
    *,
    vocab_size: int,
    eos_id: int,
    metadata: Mapping[str, Any] | None = None,
    shard_tokens: int = 2**27,
) -> TokenFile:
    """Write documents as a token file, each closed by ``eos_id``.

    Documents are pulled one at a time. The directory appears under its name only when it is
    complete; a token file that stood there is replaced at that moment and not before.

    Args:
        path: The directory to write.
        documents: 1-D arrays (or lists, or CPU tensors) of token ids.
        vocab_size: Ids must be below it; up to 65,536 they are stored in two bytes, else in four.
        eos_id: The id put after each document.
        metadata: What else to keep in the index, for JSON. Read after the last document, so that it
            can hold what was counted on the way, such as ``text_bytes``.
        shard_tokens: Tokens per shard; documents may lie across two.

    Returns:
        The token file, open for reading.

    Raises:
        ValueError: If a size or id is out of range, a document is not a 1-D array of integers, or
            there is no document.
        FileExistsError: If ``path`` holds anything but a token file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = write_tokens(f"{folder}/a", [[1, 2], [3]], vocab_size=4, eos_id=0)
        ...     file.read(0, 5).tolist(), file.offsets.tolist()
        ([1, 2, 0, 3, 0], [0, 3, 5])
    """
    _check_sizes(vocab_size, eos_id, shard_tokens)
    with atomic_directory(path, is_replaceable=is_token_file) as folder:
        with TokenWriter(folder, vocab_size, eos_id, shard_tokens) as writer:
            for document in documents:
                writer.append(document)
        writer.finish(metadata or {})
    return open_tokens(path)


class TokenWriter:
    """Fills a folder with a token file, document by document; ``write_tokens`` in steps.

    ``position()`` between two documents says where it stands, and a writer that is given that goes
    on there, whatever was appended since. The files are then those of one undisturbed writer.

    Args:
        folder: An empty folder, or one that another writer was filling.
        vocab_size: As for ``write_tokens``.
        eos_id: As for ``write_tokens``.
        shard_tokens: As for ``write_tokens``.
        position: Where the other writer stood.

    Raises:
        DamagedError: If the folder is not what the other writer left.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_id: int,
        shard_tokens: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        _check_sizes(vocab_size, eos_id, shard_tokens)
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._sizes = (vocab_size, eos_id)
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._shards = ShardWriter(folder, self._dtype, shard_tokens, position)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.close()

    def append(self, document: ArrayLike) -> None:
        """Add a document and the id that closes it."""
        vocab_size, eos_id = self._sizes
        ids = _checked_ids(document, self._shards.documents, vocab_size)
        closed = np.empty(len(ids) + 1, dtype=self._dtype)
        closed[:-1], closed[-1] = ids, eos_id
        self._shards.append(closed)

    def position(self) -> dict[str, Any]:
        """Where it stands, in JSON values; what is written up to here outlives a kill."""
        return self._shards.position()

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write the index, once the files are closed: only now is the folder a token file."""
        if not self._shards.documents:
            raise ValueError("there are no documents; a token file needs at least one.")
        vocab_size, eos_id = self._sizes
        sizes = {"dtype": self._dtype.name, "vocab_size": vocab_size, "eos_id": eos_id}
        summary = self._shards.summary(vocab_size, eos_id)
        write_index(self._folder, {**sizes, **summary, "metadata": dict(metadata)})


@attrs.frozen(eq=False)
class TokenFile:
    """A token file, memory-mapped; ``open_tokens`` makes one.

    Attributes:
        path: Its directory.
        vocab_size: Every id is below it.
        eos_id: The id that closes each document.
        tokens: Number of tokens, the closing ones included.
        fingerprint: Hash of tokens, documents, vocabulary size and closing id.
        metadata: What its writer kept.
        offsets: ``[documents + 1]`` int64: where each document starts, and the end of the last.
        shards: The tokens, as they lie in the files.
        starts: The number of each shard's first token.
    """

    path: Path
    vocab_size: int
    eos_id: int
    tokens: int
    fingerprint: str
    metadata: dict[str, Any] = attrs.field(repr=False)
    offsets: NDArray[np.int64] = attrs.field(repr=False)
    shards: list[NDArray[Any]] = attrs.field(repr=False)
    starts: list[int] = attrs.field(repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map would be pickled with all it maps.
        return open_tokens, (self.path,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Copy tokens ``start`` to ``stop`` out of the shards."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(
                f"tokens {start}:{stop} must lie within 0:{self.tokens} of {self.path}."
            )
        out = np.empty(stop - start, dtype=np.int64)
        self.read_into(out, start)
        return out

    def read_into(self, out: NDArray[np.int64], start: int) -> None:
        """Fill ``out`` with the tokens from ``start`` on; the caller keeps within the file."""
        shard = bisect_right(self.starts, start) - 1
        done, within = 0, start - self.starts[shard]
        while done < len(out):
            piece = self.shards[shard][within : within + len(out) - done]
            out[done : done + len(piece)] = piece
            done, within, shard = done + len(piece), 0, shard + 1

    def document_starts(self, start: int, length: int) -> NDArray[np.int64]:
        """Say where documents start among ``length`` tokens from ``start``, counted from there.

        The first entry is 0: the document that token ``start`` lies in, or its rest.
        """
        first = np.searchsorted(self.offsets, start, side="right")
        last = np.searchsorted(self.offsets, start + length, side="left")
        return np.concatenate([[0], self.offsets[first:last] - start])


def open_tokens(path: str | os.PathLike[str], *, verify: bool = False) -> TokenFile:
    """Open a token file for reading, after checking the kind and size of each of its parts.

    Args:
        path: The directory.
        verify: Read everything and compare it with the checksums in the index: about a second per
            gigabyte, and the only way to see that a disk or a copy has changed a byte.

    Returns:
        The token file; tokens are read from the disk when they are used.

    Raises:
        FileNotFoundError: If there is no token file, or a part of it is missing.
        ValueError: If a part is truncated, foreign, changed or of another version; names the file.
    """
    folder = path_of("the token file", path)
    index = read_index(folder)
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    counts = index["shards"]
    if verify:
        _verify(folder, index, dtype)
    shards = [map_numbers(folder / shard_name(i), dtype, count) for i, count in enumerate(counts)]
    return TokenFile(
        path=folder,
        vocab_size=index["vocab_size"],
        eos_id=index["eos_id"],
        tokens=index["tokens"],
        fingerprint=index["fingerprint"],
        metadata=index["metadata"],
        offsets=map_numbers(folder / OFFSETS_NAME, OFFSET, index["documents"] + 1),
        shards=shards,
        starts=[0, *np.cumsum(counts).tolist()[:-1]],
    )


def is_token_file(path: str | os.PathLike[str], *, besides: Iterable[str] = ()) -> bool:
    """Say whether a directory is a token file and holds nothing else, or only what is ``besides``.

    Then it may be replaced without the loss of anything that somebody put there.
    """
    folder = Path(path)
    try:
        index = read_index(folder)
    except (OSError, ValueError):
        return False
    own = {INDEX, OFFSETS_NAME, *besides, *(shard_name(i) for i in range(len(index["shards"])))}
    return own >= {entry.name for entry in folder.iterdir()}


def _verify(folder: Path, index: dict[str, Any], dtype: np.dtype[Any]) -> None:
    parts = [(shard_name(i), dtype, count) for i, count in enumerate(index["shards"])]
    checksums = index.get("checksums", {})
    for name, kind, count in [*parts, (OFFSETS_NAME, OFFSET, index["documents"] + 1)]:
        if name not in checksums:
            raise ValueError(
                f"{folder / INDEX} has no checksum of {name}, so it cannot be verified. "
                "Write the token file again."
            )
        map_numbers(folder / name, kind, count)
        check_numbers(folder / name, kind, count, checksums[name])


def _check_sizes(vocab_size: int, eos_id: int, shard_tokens: int) -> None:
    anything = -(2**63)
    check_integers(
        vocab_size=(vocab_size, anything),
        eos_id=(eos_id, anything),
        shard_tokens=(shard_tokens, 1),
    )
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(
            f"vocab_size {vocab_size} must be 1 to 2**32: ids take four bytes at most."
        )
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id {eos_id} must be 0 to vocab_size - 1 = {vocab_size - 1}.")


def _checked_ids(document: ArrayLike, number: int, vocab_size: int) -> NDArray[Any]:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"document {number} is {ids.dtype} of shape {ids.shape}; a document is a 1-D array of "
            "integers. Pass an iterable of such arrays; encode text with a tokenizer first."
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"document {number} holds token id {wrong}; ids must be 0 to vocab_size - 1 = "
            f"{vocab_size - 1}. Pass the vocab_size of the tokenizer that made them."
        )
    return ids
