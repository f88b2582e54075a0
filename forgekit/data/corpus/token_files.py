"""Token files: a directory of binary shards with an index, written whole and read by memory map.

::

    PATH/index.json        names the shards; sizes, checksums and a fingerprint of the tokens
    PATH/shard_00000.bin   32 bytes of header, then token ids: uint16 or uint32, little-endian
    PATH/offsets.bin       32 bytes of header, then [documents + 1] int64: where each one starts

Each binary file records what it is, which integers it holds and how many, so a truncated or foreign
file is refused instead of trained on.
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

from forgekit.data.corpus.number_files import checksum_of, map_numbers
from forgekit.data.corpus.token_index import INDEX, read_index
from forgekit.data.corpus.token_writer import TokenWriter, files_of
from forgekit.files import atomic_directory, restore_replaced
from forgekit.inputs import path_of

HELD_OUT = "heldout"
"""The folder of held-out documents inside the token file that ``prepare`` writes."""

FACTS = ("vocab_size", "eos_id", "tokens", "fingerprint", "metadata")
"""Entries of the index that a ``TokenFile`` has as they are."""


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
    complete; until that moment an older token file stays.

    Args:
        path: The directory to write.
        documents: 1-D arrays (or lists, or CPU tensors) of token ids.
        vocab_size: Ids must be below it; up to 65,536 they are stored in two bytes, else in four.
        eos_id: The id put after each document.
        metadata: More entries for the index, JSON values. Read after the last document, so it can
            hold counts that the documents add up, such as ``text_bytes``.
        shard_tokens: Tokens per shard; a document may cross from one shard into the next.

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
    with atomic_directory(path, is_replaceable=is_token_file) as folder:
        with TokenWriter(folder, vocab_size, eos_id, shard_tokens) as writer:
            for document in documents:
                writer.append(document)
        writer.finish(metadata or {})
    return open_tokens(path)


@attrs.frozen(eq=False)
class TokenFile:
    """A token file, memory-mapped; ``open_tokens`` makes one.

    Attributes:
        path: Its directory.
        vocab_size: Every id is below it.
        eos_id: The id that closes each document.
        tokens: Number of tokens, the closing ones included.
        fingerprint: Hash of tokens, documents, vocabulary size and closing id.
        metadata: The writer's own entries.
        offsets: ``[documents + 1]`` int64: where each document starts, and the end of the last.
        shards: The tokens, one memory-mapped array per file.
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
        # pickle would copy all that a memory map holds
        return open_tokens, (self.path,)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, from the metadata's ``text_bytes``; None if it has none."""
        text_bytes = self.metadata.get("text_bytes")
        return None if text_bytes is None else text_bytes / self.tokens

    def held_out(self) -> TokenFile | None:
        """Open the held-out documents that ``forgekit prepare`` wrote; None if there are none."""
        path = self.path / HELD_OUT
        return open_tokens(path) if path.is_dir() else None

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
        """Fill ``out`` with the tokens from ``start`` on; the caller stays within the file."""
        shard = bisect_right(self.starts, start) - 1
        done, within = 0, start - self.starts[shard]
        while done < len(out):
            piece = self.shards[shard][within : within + len(out) - done]
            out[done : done + len(piece)] = piece
            done, within, shard = done + len(piece), 0, shard + 1

    def document_starts(self, start: int, length: int) -> NDArray[np.int64]:
        """Find where documents start among ``length`` tokens from ``start``, relative to it.

        The first entry is 0: the document that holds token ``start``, or the rest of it.
        """
        first = np.searchsorted(self.offsets, start, side="right")
        last = np.searchsorted(self.offsets, start + length, side="left")
        return np.concatenate([[0], self.offsets[first:last] - start])


def open_tokens(path: str | os.PathLike[str], *, verify: bool = False) -> TokenFile:
    """Open a token file for reading, after checking the header and size of each of its files.

    Args:
        path: The directory.
        verify: Read all bytes and compare them with the checksums in the index: about a second per
            gigabyte, and the only way to find a byte that a disk or a copy has changed.

    Returns:
        The token file; tokens are read from disk on use.

    Raises:
        FileNotFoundError: If there is no token file, or one of its files is missing.
        ValueError: If a file is truncated, foreign, changed or of another version; names it.
    """
    folder = restore_replaced(path_of("the token file", path))
    index = read_index(folder)
    counts, maps = index["shards"], [map_numbers(*part) for part in _parts(folder, index)]
    if verify:
        _verify(folder, index)
    facts = {name: index[name] for name in FACTS}
    starts = [0, *np.cumsum(counts).tolist()[:-1]]
    return TokenFile(path=folder, **facts, offsets=maps.pop(), shards=maps, starts=starts)


def is_token_file(path: str | os.PathLike[str], *, besides: Iterable[str] = ()) -> bool:
    """Whether a directory is a token file and holds nothing else, names in ``besides`` excepted.

    Then it may be replaced without losing anybody's files.
    """
    folder = Path(path)
    try:
        index = read_index(folder)
    except (OSError, ValueError):
        return False
    own = {INDEX, *besides, *(file.name for file, _, _ in _parts(folder, index))}
    return own >= {entry.name for entry in folder.iterdir()}


def _parts(folder: Path, index: dict[str, Any]) -> list[tuple[Path, np.dtype[Any], int]]:
    """List file, dtype and count of each shard and, last, of the offsets."""
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    return files_of(folder, dtype, index["shards"], index["documents"])


def _verify(folder: Path, index: dict[str, Any]) -> None:
    for part in _parts(folder, index):
        expected = index["checksums"].get(part[0].name)
        if (found := f"{checksum_of(*part):08x}") != expected:
            raise ValueError(
                f"{part[0]} has crc32 {found}; index.json says {expected}. Its content has changed "
                "since it was written: write the token file again, or restore the file."
            )
