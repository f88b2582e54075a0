"""Documents: the same few words for all sources, so that reading them can stop and go on anywhere.

A source is a value: it holds what to read and no position. ``read(position)`` yields records, and
each record says where to go on after it, in plain JSON values. So whoever keeps the last ``after``
resumes exactly there, and the same source can be read twice, or by several readers that share the
documents: reader ``part`` of ``parts`` gets every ``parts``-th.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, TypeAlias, cast

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Content",
    "Documents",
    "Errors",
    "Record",
    "as_documents",
]

Content: TypeAlias = "str | NDArray[np.int64]"
Errors: TypeAlias = Literal["raise", "skip"]


@attrs.frozen
class Record:
    """One document as it was read.

    Attributes:
        name: Where it stands, for error messages: a file, a line, a row.
        content: Its text, or its token ids, ``[s]`` int64; None if it is broken.
        after: Where reading goes on after it; a JSON value that only its source understands.
        done: Bytes of the source read so far, for progress; 0 where nobody knows.
        problem: Why it could not be read. Only sources with ``errors="skip"`` yield such records.
    """

    name: str
    content: Content | None
    after: Any
    done: int = 0
    problem: str | None = None


class Documents(Protocol):
    """What ``prepare`` and ``stream_documents`` read. Any class with these three will do."""

    @property
    def fingerprint(self) -> str:
        """Names the content: files, sizes, settings. Other documents, another fingerprint."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes to read in all, for progress; None if nobody knows."""
        ...

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Read from a position on, the ``after`` of an earlier record; None is the start.

        Args:
            position: Of a record that the same ``part`` of the same ``parts`` has read.
            part: This reader's number.
            parts: Number of readers that share the documents, each getting its own.
        """
        ...


def as_documents(documents: Documents | Iterable[Any]) -> Documents:
    """Make a source of whatever can be iterated anew: a list of texts, of arrays, or of pairs.

    Args:
        documents: A source, which is returned as it is, or a collection of texts, 1-D arrays of
            token ids, or pairs of a name and one of these. A position in a collection is a count,
            so resuming walks through what comes before.

    Raises:
        TypeError: If it is an iterator, which can be read only once, or no collection at all.

    Examples:
        >>> [(record.name, record.after) for record in as_documents(["a", "b", "c"]).read(1)]
        [('document 1', 2), ('document 2', 3)]
    """
    if hasattr(documents, "read") and hasattr(documents, "fingerprint"):
        return cast(Documents, documents)
    if isinstance(documents, str) or not isinstance(documents, Iterable):
        raise TypeError(
            f"documents is a {type(documents).__name__}; it must be a source, such as "
            "forgekit.text_documents(paths) returns, or a list of texts or arrays."
        )
    if iter(documents) is documents:
        raise TypeError(
            f"documents is a {type(documents).__name__}, which can be read only once, so it can "
            "neither repeat nor resume. Pass a list, or an object whose __iter__ starts anew."
        )
    return _Collection(documents)


@attrs.frozen
class _Collection:
    """Documents out of anything that can be iterated again and again."""

    items: Iterable[Any]

    @property
    def fingerprint(self) -> str:
        return "collection"

    @property
    def size(self) -> int | None:
        return None

    def read(
        self, position: int | None = None, *, part: int = 0, parts: int = 1
    ) -> Iterator[Record]:
        for number, item in enumerate(self.items):
            if number >= (position or 0) and number % parts == part:
                pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
                name, content = item if pair else (f"document {number}", item)
                ids = content if isinstance(content, str) else np.asarray(content)
                yield Record(name, ids, number + 1)
