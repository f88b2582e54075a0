"""Documents: one protocol for all sources, so that reading can stop and resume anywhere.

A source is a value: it holds what to read and no position. ``read(position)`` yields records, and
each record holds the position after it, in plain JSON values. Reading resumes exactly from any
record's ``after``. The same source can be read twice, or by several readers that share the
documents: reader ``part`` of ``parts`` gets every ``parts``-th.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.hashing import hash_integers
from forgekit.inputs import LARGEST, check_choice, check_integers, quoted, wrong_type

Content: TypeAlias = "str | NDArray[np.int64]"
Errors: TypeAlias = Literal["raise", "skip"]

HASHED = 1000
"""Documents that stand for a collection of unknown length."""


@attrs.frozen
class Record:
    """One document as it was read.

    Attributes:
        name: Where it was found, for error messages: a file, a line, a row.
        content: Its text, or its token ids, ``[s]`` int64; None if it is broken.
        after: The position after it; a JSON value that only its source interprets.
        done: Bytes of the source read so far, for progress; 0 if unknown.
        problem: Why it could not be read. Only sources with ``errors="skip"`` yield such records.
    """

    name: str
    content: Content | None
    after: Any
    done: int = 0
    problem: str | None = None


class Documents(Protocol):
    """What ``prepare`` and ``stream_documents`` read: any class with these three members."""

    @property
    def fingerprint(self) -> str:
        """Names the content: files, sizes, settings. Other documents, another fingerprint."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes to read in all, for progress; None if unknown."""
        ...

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Read from a position, the ``after`` of an earlier record; None is the start.

        Args:
            position: Of a record that the same ``part`` of the same ``parts`` has read.
            part: This reader's number.
            parts: Number of readers that share the documents.
        """
        ...


def as_documents(documents: Documents | Iterable[Any]) -> Documents:
    """Make a source of any collection that can be iterated again: texts, arrays, or pairs.

    Args:
        documents: A source, which is returned unchanged, or a collection of texts, 1-D arrays of
            token ids, or pairs of a name and one of these. A position in a collection is a count,
            so resuming iterates over everything before it.

    Raises:
        TypeError: If it is an iterator, which can be read only once, or no collection at all.

    Examples:
        >>> [(record.name, record.after) for record in as_documents(["a", "b", "c"]).read(1)]
        [('document 1', 2), ('document 2', 3)]
    """
    if hasattr(documents, "read") and hasattr(documents, "fingerprint"):
        return cast(Documents, documents)
    is_text = isinstance(documents, str)
    if is_text or not isinstance(documents, Iterable) or iter(documents) is documents:
        raise TypeError(
            f"documents is a {type(documents).__name__}; it must be a source, such as "
            "forgekit.data.text_documents(paths) returns, or a list of texts or arrays. An "
            "iterator can be read only once, so it can neither repeat nor resume."
        )
    return _Collection(documents)


@attrs.frozen
class _Collection:
    """Documents in any object that can be iterated repeatedly."""

    items: Iterable[Any]

    size = None

    @property
    def fingerprint(self) -> str:
        """Hash of the contents; of a collection without a length, of the first ones."""
        digest = hashlib.sha256()
        most = None if isinstance(self.items, Sized) else HASHED
        for record in itertools.islice(self.read(), most):
            content = record.content
            ids = content.encode() if isinstance(content, str) else np.asarray(content).tobytes()
            digest.update(f"{type(content).__name__} {len(ids)} ".encode() + ids)
        return digest.hexdigest()

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        for number, item in enumerate(self.items):
            if number >= (position or 0) and number % parts == part:
                pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
                name, content = item if pair else (f"document {number}", item)
                ids = content if isinstance(content, str) else np.asarray(content)
                yield Record(name, ids, number + 1)


@attrs.frozen
class NumberedDocuments:
    """Documents of token ids that are found by their number, which is also a reader's position.

    Attributes:
        source: Where they come from, for the names of documents.
        fingerprint: Identifies their tokens.
        count: How many there are.
        ids_of: Returns the ids of a number, ``[s]`` int64.
    """

    source: str
    fingerprint: str
    count: int
    ids_of: Callable[[int], NDArray[np.int64]] = attrs.field(repr=False)

    size = None  # only texts have their progress shown

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.ids_of, range(self.count))

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        """Yield this part's documents from a number on; see ``Documents``."""
        for number in range(position or 0, self.count):
            if number % parts == part:
                name = f"{self.source}, document {number}"
                yield Record(name, self.ids_of(number), number + 1)


def random_documents(
    vocab_size: int, count: int, *, longest: int = 1024, shortest: int = 1, seed: int = 0
) -> NumberedDocuments:
    """Make documents of random tokens, to try a model or a machine without data.

    Args:
        vocab_size: Ids are uniform over ``range(vocab_size)``.
        count: Number of documents.
        longest: Most tokens in a document.
        shortest: Fewest tokens in a document; lengths are uniform in between.
        seed: Selects the tokens. The same seed gives the same tokens on every machine.

    Returns:
        A source for ``stream_documents``. Iterating it gives arrays, for ``write_tokens``.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> [ids.tolist() for ids in random_documents(100, 2, longest=4)]
        [[38, 26, 65, 59], [14, 28, 98, 53]]
    """
    check_integers(
        vocab_size=(vocab_size, 1),
        count=(count, 1),
        shortest=(shortest, 1),
        longest=(longest, shortest),
        seed=(seed, -LARGEST),
    )
    fingerprint = f"random_documents({vocab_size=}, {count=}, {shortest=}, {longest=}, {seed=})"
    ids_of = partial(_random_ids, vocab_size, shortest, longest, seed)
    return NumberedDocuments("random tokens", fingerprint, count, ids_of)


def _random_ids(
    vocab_size: int, shortest: int, longest: int, seed: int, number: int
) -> NDArray[np.int64]:
    key = hash_integers(number, seed)
    length = shortest + int(key) % (longest - shortest + 1)
    return (hash_integers(np.arange(length), key) % np.uint64(vocab_size)).astype(np.int64)


def check_ids(name: str, document: ArrayLike, vocab_size: int = 2**32) -> NDArray[Any]:
    """Return a document as an array of token ids.

    Args:
        name: Names the document in errors.
        document: A 1-D array (or list, or CPU tensor) of integers.
        vocab_size: Every id must be below it.

    Raises:
        ValueError: If it is something else, or an id is out of range.
    """
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} is {ids.dtype} of shape {ids.shape}; a document is a 1-D array of integers. "
            "Pass an iterable of such arrays; encode text with a tokenizer first."
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(
            f"{name} holds token id {wrong}; ids must be 0 to vocab_size - 1 = {vocab_size - 1}. "
            "Pass the vocab_size of the tokenizer; mask a loss in labels, not in ids."
        )
    return ids


def check_reading(text_key: str, errors: str) -> None:
    """Refuse arguments that no source of texts has."""
    check_choice("errors", errors, get_args(Errors))
    if not isinstance(text_key, str):
        raise wrong_type("text_key", text_key, "text")


def check_column(data: str, key: str, names: Iterable[str]) -> None:
    """Refuse a column that some data do not have."""
    if key not in names:
        raise ValueError(
            f'{data} has no column "{key}"; it has {quoted(names)}. Name one with text_key.'
        )
