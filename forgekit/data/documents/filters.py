"""Which documents are kept, and an account of the others: broken ones, and those a filter dropped.

Each document carries the account up to it. Reading runs ahead of writing, so an account of what was
read would count some documents twice after a kill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.protocol import Documents, Record

Filters: TypeAlias = Mapping[str, Callable[[str], bool]]
"""Functions that return False for a document to drop, by the name that counts it."""

BROKEN_NAMED = 10


@attrs.frozen
class Account:
    """Counts of the documents that were left out.

    Attributes:
        broken: Number of documents that could not be read.
        first_broken: The problems of the first ten.
        dropped: Number of documents that each filter dropped.
    """

    broken: int = 0
    first_broken: tuple[str, ...] = ()
    dropped: dict[str, int] = attrs.field(factory=dict)

    def with_broken(self, problem: str) -> Account:
        """Count a broken document, and keep the problems of the first ten."""
        named = (*self.first_broken, problem)[:BROKEN_NAMED]
        return attrs.evolve(self, broken=self.broken + 1, first_broken=named)

    def with_dropped(self, name: str) -> Account:
        """Count a document that a filter dropped."""
        return attrs.evolve(self, dropped=self.dropped | {name: self.dropped.get(name, 0) + 1})


def read_filtered(
    documents: Documents, filters: Filters, position: Any, account: Account
) -> Iterator[tuple[Record, str | None, Account]]:
    """Yield each document from a position on, its text, and the account up to it.

    Args:
        documents: The source.
        filters: By name.
        position: The source's.
        account: What was left out before.

    Yields:
        The record; its text, or None if it is left out; and the account, with this document.

    Raises:
        TypeError: If a document consists of token ids.
    """
    for record in documents.read(position):
        text = record.content
        if record.problem is not None:
            text, account = None, account.with_broken(record.problem)
        elif not isinstance(text, str):
            raise TypeError(
                f"{record.name} is token ids, not text. forgekit.write_tokens writes a token file "
                "of ids."
            )
        elif (name := _dropped_by(filters, record.name, text)) is not None:
            text, account = None, account.with_dropped(name)
        yield record, text, account


def _dropped_by(filters: Filters, document: str, text: str) -> str | None:
    for name, keeps in filters.items():
        try:
            if not keeps(text):
                return name
        except Exception as error:
            error.add_note(f"raised by the filter {name!r} on {document}")
            raise
    return None


def describe_filters(filters: Filters) -> str:
    """Hash the filters' names and code, so that a changed filter is detected.

    Values that a function reads from its surroundings are not covered.
    """
    digest = hashlib.sha256()
    for name, keeps in filters.items():
        digest.update(f"{name} {getattr(keeps, '__qualname__', type(keeps).__qualname__)}".encode())
        _update(digest, getattr(keeps, "__code__", None))
    return digest.hexdigest()


def _update(digest: Any, code: CodeType | None) -> None:
    if code is not None:
        digest.update(code.co_code + repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                _update(digest, constant)
            elif isinstance(constant, frozenset):  # its order depends on Python's hash
                digest.update(repr(sorted(map(repr, constant))).encode())
            else:
                digest.update(repr(constant).encode())
