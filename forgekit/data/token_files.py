"""Token files: directories of numpy arrays with an index, written atomically and memory-mapped.

::

    PATH/index.json         vocabulary, tokens of each shard, checksums, the writer's metadata
    PATH/shard_00000.npy    [tokens] token ids: uint16 or uint32; with a teacher's rows the bytes
                            of [tokens] of ``taught_type``
    PATH/offsets.npy        [documents + 1] int64: where each document starts

Each array records its type and its length, so a truncated or foreign file is refused instead of
trained on. The index is written last. Of a token file behind a URL, blocks are fetched when they
are read, and compared with the checksums that the index names for each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.checks import check_integers
from forgekit.data.batch import IGNORED
from forgekit.data.documents import check_document, taught_k, taught_type
from forgekit.files import atomic_directory, restore_replaced
from forgekit.remote.block_cache import (
    BLOCK_BYTES,
    NPY_HEADER_BYTES,
    Block,
    BlockCache,
    RemoteArray,
    checksums_of,
    fetch_blocks,
)
from forgekit.remote.urls import Location, Url, content_of, fs_of, location_of, retried

INDEX = "index.json"
OFFSETS = "offsets.npy"
KIND = {"kind": "forgekit-tokens", "version": 3}

HELD_OUT = "heldout"
"""Folder of the held-out documents inside a token file of ``prepare``."""

SHARD_TOKENS = 2**25
"""Tokens per shard, which is filled in memory."""


def write_tokens(
    path: str | os.PathLike[str],
    documents: Iterable[ArrayLike | Mapping[str, Any]],
    *,
    vocab_size: int,
    eos_id: int,
    metadata: Mapping[str, Any] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenFile:
    """Write documents as a token file, each closed by ``eos_id``.

    Documents are pulled one at a time. The directory appears under its name only when it is
    complete; until that moment an older token file stays.

    Args:
        path: The directory to write.
        documents: 1-D arrays (or lists, or CPU tensors) of token ids; or, to keep a teacher's rows
            of the token after each, mappings of ``input_ids`` ``[s]``, ``teacher_ids`` and
            ``teacher_log_probs`` ``[s k]``, natural logarithms, with one k. Ids of -100 leave a
            position out, as the closing token's is. Logarithms are kept in float32.
        vocab_size: Ids must be below it; up to 65,536 they are stored in two bytes, else in four.
        eos_id: The id put after each document.
        metadata: More entries for the index, JSON values. Read after the last document, so it can
            hold counts that the documents add up, such as ``text_bytes``.
        shard_tokens: Tokens per shard, with a teacher's rows a k-th of it; a document may cross
            from one shard into the next.

    Returns:
        The token file, open for reading.

    Raises:
        ValueError: If a size or id is out of range, a document is not a 1-D array of integers, a
            teacher's rows have another k, an id twice or probabilities that sum above 1, or there
            is no document.
        FileExistsError: If ``path`` holds anything but a token file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = write_tokens(f"{folder}/a", [[1, 2], [3]], vocab_size=4, eos_id=0)
        ...     file.read(0, 5).tolist(), file.offsets.tolist()
        ([1, 2, 0, 3, 0], [0, 3, 5])
    """
    check_integers(vocab_size=(vocab_size, 1, 2**32), shard_tokens=(shard_tokens, 1))
    check_integers(eos_id=(eos_id, 0, vocab_size - 1))
    sizes = {"vocab_size": vocab_size, "eos_id": eos_id, "shard_tokens": shard_tokens}
    with atomic_directory(path, is_replaceable=is_token_file) as folder:
        fill_tokens(folder, documents, **sizes, metadata={} if metadata is None else metadata)
    return open_tokens(path)


def fill_tokens(
    folder: Path,
    documents: Iterable[ArrayLike | Mapping[str, Any]],
    *,
    vocab_size: int,
    eos_id: int,
    metadata: Mapping[str, Any],
    shard_tokens: int,
) -> None:
    """Write a token file into an existing folder; the caller makes the folder durable.

    Args:
        folder: The folder; files of the same names in it are replaced.
        documents: As for ``write_tokens``, like all others.
        vocab_size: Number of token ids.
        eos_id: The id put after each document.
        metadata: More entries for the index.
        shard_tokens: Tokens per shard.
    """
    ends, counts, checksums = array("q", [0]), [], {}
    digest = hashlib.sha256(f"{vocab_size} {eos_id}".encode())

    def closed() -> Iterator[NDArray[Any]]:
        k = None
        for number, document in enumerate(documents):
            ids = check_document(f"document {number}", document, vocab_size, k=k)
            k = taught_k(ids)
            ends.append(ends[-1] + len(ids) + 1)
            yield np.append(ids, np.array((eos_id, IGNORED, 0), ids.dtype) if k else eos_id)

    def save(name: str, values: NDArray[Any]) -> None:
        np.save(folder / name, values.view(np.uint8) if values.dtype.names else values)
        checksums[name] = " ".join(checksums_of(values, _block_bytes(name, values.nbytes)))
        digest.update(values.data)  # of the tokens, however they are divided into shards

    if (first := next(arrays := closed(), None)) is None:
        raise ValueError("there are no documents; a token file needs at least one.")
    k = taught_k(first)
    size, dtype = max(shard_tokens // max(k, 1), 1), _dtype(vocab_size, k)
    for shard in _shards(itertools.chain([first], arrays), size, dtype):
        save(_shard_name(len(counts)), shard)
        counts.append(len(shard))
    save(OFFSETS, np.frombuffer(ends, np.int64))
    index = {**KIND, "vocab_size": vocab_size, "eos_id": eos_id, "shards": counts}
    index |= {"teacher_k": k} if k else {}
    index |= {"checksums": checksums, "fingerprint": digest.hexdigest(), "metadata": dict(metadata)}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _dtype(vocab_size: int, k: int) -> np.dtype[Any]:
    ids = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
    return taught_type(k, ids) if k else ids


def _block_bytes(name: str, size: int) -> int:
    """Return the block size for fetches from a URL; offsets, which are searched, come whole."""
    return size if name == OFFSETS else BLOCK_BYTES


def _shards(documents: Iterable[NDArray[Any]], size: int, dtype: Any) -> Iterator[NDArray[Any]]:
    """Yield shards of one size, and a rest, in one buffer that the next shard overwrites."""
    shard, filled = np.empty(size, dtype), 0
    for ids in documents:
        while len(ids):
            piece, ids = ids[: size - filled], ids[size - filled :]
            shard[filled : filled + len(piece)] = piece
            filled += len(piece)
            if filled == size:
                yield shard
                filled = 0
    if filled:
        yield shard[:filled]


@attrs.frozen(eq=False)
class TokenFile:
    """A memory-mapped token file, made by ``open_tokens``.

    Attributes:
        path: Its directory, or its URL.
        vocab_size: Every id is below it.
        eos_id: The id that closes each document.
        fingerprint: Hash of tokens, documents, vocabulary size and closing id.
        metadata: The writer's own entries.
        offsets: ``[documents + 1]`` int64: where each document starts, and the end of the last.
        shards: The tokens, one memory-mapped or remote array per file.
        starts: The number of each shard's first token.
    """

    path: Location
    vocab_size: int
    eos_id: int
    fingerprint: str
    metadata: dict[str, Any] = attrs.field(repr=False)
    offsets: NDArray[np.int64] = attrs.field(repr=False)
    shards: list[Any] = attrs.field(repr=False)
    starts: list[int] = attrs.field(repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle would copy all that a memory map holds
        return open_tokens, (self.path,)

    @property
    def tokens(self) -> int:
        """Number of tokens, end-of-document ids included."""
        return int(self.offsets[-1])

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
        is_there = path.is_dir() if isinstance(path, Path) else content_of(path / INDEX)
        return open_tokens(path) if is_there else None

    def prefetch(self, spans: Iterable[Sequence[int]]) -> None:
        """Fetch the tokens of each span ``(start, stop)``, if they are behind a URL.

        Of a token file behind a URL they come all at once; else each read would wait for its own.
        """
        if isinstance(self.path, Path):
            return
        blocks: list[Block] = []
        for start, *_, stop in spans:
            first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
            for shard, begins in zip(self.shards[first:last], self.starts[first:last], strict=True):
                here = slice(max(start - begins, 0), stop - begins)
                blocks += [(shard, number) for number in shard.blocks(here)]
        fetch_blocks(blocks)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Copy tokens ``start`` to ``stop`` out of the shards, ``[n]`` int64.

        Of a file with a teacher's rows, ``[n]`` of ``taught_type``.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start}:{stop} must lie within 0:{self.tokens}.")
        stored = self.shards[0].dtype
        out = np.empty(stop - start, dtype=stored if stored.names else np.int64)
        shard = bisect_right(self.starts, start) - 1
        done, within = 0, start - self.starts[shard]
        while done < len(out):
            piece = self.shards[shard][within : within + len(out) - done]
            out[done : done + len(piece)] = piece
            done, within, shard = done + len(piece), 0, shard + 1
        return out


def open_tokens(path: str | os.PathLike[str], *, verify: bool = False) -> TokenFile:
    """Open a token file after checking header and size of each of its files.

    Behind a URL a block of tokens is fetched when it is read, compared with its checksum, and kept
    on the local disk: in ``FORGEKIT_CACHE``, up to ``FORGEKIT_CACHE_GIB`` (8).

    Args:
        path: The directory, or its URL.
        verify: Read all bytes and compare them with the checksums in the index: a second or two
            per gigabyte, and the only way to find a byte that a disk or a copy has changed.

    Returns:
        The token file; tokens are read on use.

    Raises:
        FileNotFoundError: If there is no token file.
        ValueError: If a file is missing, truncated, foreign, changed or of another version.
        UrlError: If what is behind the URL cannot be reached.
    """
    folder = location_of("the token file", path)
    if isinstance(folder, Path):
        restore_replaced(folder)
    index = _read_index(folder)
    counts, vocab_size = index["shards"], index["vocab_size"]
    checksums = {name: text.split() for name, text in index["checksums"].items()}
    names = [*map(_shard_name, range(len(counts))), OFFSETS]
    dtype = _dtype(vocab_size, index.get("teacher_k", 0))
    if isinstance(folder, Path):
        *shards, offsets = [_map(folder / name) for name in names]
        shards = [shard.view(dtype) for shard in shards] if dtype.names else shards
    else:
        *shards, offsets = _remote(folder, names, counts, dtype, checksums)
        with offsets.opened(0) as block:
            offsets = np.memmap(block, np.int64, mode="r").view(np.ndarray)
    ends = offsets[-1:].tolist()
    if [len(shard) for shard in shards] != counts or ends != [sum(counts)]:
        raise ValueError(
            f"{folder} has {sum(map(len, shards))} tokens in its shards and documents up to "
            f"{ends}; {INDEX} says {sum(counts)}. Write the token file again."
        )
    for name, values in zip(names, [*shards, offsets], strict=True) if verify else ():
        values = values[:]
        if checksums_of(values, _block_bytes(name, values.nbytes)) != checksums.get(name):
            raise ValueError(
                f"{folder / name} differs from its checksum in {INDEX}. Restore it, or write the "
                "token file again."
            )
    starts = [0, *itertools.accumulate(counts[:-1])]
    eos_id, fingerprint, metadata = index["eos_id"], index["fingerprint"], index["metadata"]
    return TokenFile(folder, vocab_size, eos_id, fingerprint, metadata, offsets, shards, starts)


def _remote(
    folder: Url, names: list[str], counts: list[int], dtype: Any, checksums: dict[str, list[str]]
) -> Iterator[RemoteArray]:
    """Yield the arrays behind a URL, after checking file sizes against the index."""
    (fs, root), cache = fs_of(folder), BlockCache()
    listed = retried(lambda: fs.ls(root, detail=True, refresh=True), folder)
    sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in listed}
    for name, count in zip(names, [*counts, None], strict=True):
        kind = np.dtype(np.int64) if count is None else dtype
        size = sizes.get(name, 0) - NPY_HEADER_BYTES
        length = size // kind.itemsize if count is None else count
        if not length or size != length * kind.itemsize:
            raise ValueError(
                f"{folder / name} has {sizes.get(name, 'no')} bytes, which differs from {INDEX}. "
                "Upload the token file again."
            )
        file, blocks = (folder / name, fs, f"{root}/{name}"), checksums.get(name, [])
        yield RemoteArray(*file, kind, length, blocks, _block_bytes(name, size), cache)


def is_token_file(path: str | os.PathLike[str], *, besides: Iterable[str] = ()) -> bool:
    """Whether a directory is a token file without other content than names in ``besides``.

    Then it may be replaced without losing anybody's files.
    """
    folder = Path(path)
    try:
        index = _read_index(folder)
    except (OSError, ValueError):
        return False
    names = {INDEX, OFFSETS, *besides, *map(_shard_name, range(len(index["shards"])))}
    return names >= {entry.name for entry in folder.iterdir()}


def _read_index(folder: Location) -> dict[str, Any]:
    file = folder / INDEX
    if (content := content_of(file)) is None:
        raise FileNotFoundError(
            f"{folder} is not a token file: it has no {INDEX}. `forgekit prepare` makes one."
        )
    try:
        index = json.loads(content)
    except ValueError:
        index = None
    if not isinstance(index, dict) or {**index, **KIND} != index:
        raise ValueError(
            f"{file} is not an index of {KIND['kind']} version {KIND['version']}; write it again."
        )
    return index


def _map(file: Path) -> NDArray[Any]:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"it has {array.dtype} {list(array.shape)}, not 1-D integers")
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{file} cannot be read ({error}). Write the token file again.") from None
    return array.view(np.ndarray)


def _shard_name(number: int) -> str:
    return f"shard_{number:05d}.npy"
