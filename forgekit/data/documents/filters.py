"""Which documents are kept, and an account of the others: broken ones, and those a filter dropped.

The account travels with the documents. Reading runs ahead of writing, and an account of what was
read would count some documents twice after a kill.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.protocol import Documents, Record

__all__ = ["Account", "Filters", "Kept", "describe_filters"]

Filters: TypeAlias = Mapping[str, Callable[[str], bool]]
"""By the name under which the documents are counted that a function returns False for."""

BROKEN_NAMED = 10


@attrs.frozen
class Account:
    """What was left out so far.

    Attributes:
        broken: Number of documents that could not be read.
        first_broken: What was wrong with the first of them.
        dropped: Number of documents that each filter dropped.
    """

    broken: int = 0
    first_broken: tuple[str, ...] = ()
    dropped: dict[str, int] = attrs.field(factory=dict)

    def with_broken(self, problem: str) -> Account:
        """Count a broken document, and remember what was wrong with the first ten."""
        named = (*self.first_broken, problem)[:BROKEN_NAMED]
        return attrs.evolve(self, broken=self.broken + 1, first_broken=named)

    def with_dropped(self, name: str) -> Account:
        """Count a document that a filter dropped."""
        return attrs.evolve(self, dropped=self.dropped | {name: self.dropped.get(name, 0) + 1})


class Kept:
    """Documents that can be read and that every filter keeps.

    Attributes:
        account: What was left out so far.
    """

    def __init__(self, documents: Documents, filters: Filters, account: Account) -> None:
        self.account = account
        self._documents = documents
        self._filters = filters

    def read(self, position: Any) -> Iterator[tuple[Record, str, Account]]:
        """Yield each document, its text, and the account up to it.

        Raises:
            TypeError: If a document is token ids already.
        """
        for record in self._documents.read(position):
            if record.problem is not None:
                self.account = self.account.with_broken(record.problem)
                continue
            if not isinstance(record.content, str):
                raise TypeError(
                    f"{record.name} is token ids, not text. forgekit.write_tokens writes a token "
                    "file of ids."
                )
            if (name := self._dropped_by(record.name, record.content)) is not None:
                self.account = self.account.with_dropped(name)
                continue
            yield record, record.content, self.account

    def _dropped_by(self, where: str, text: str) -> str | None:
        for name, keeps in self._filters.items():
            try:
                is_kept = keeps(text)
            except Exception as error:
                error.add_note(f"raised by the filter {name!r} on {where}")
                raise
            if not is_kept:
                return name
        return None


def describe_filters(filters: Filters) -> str:
    """Name filters and hash their code, so that another filter is seen to be another.

    What a function reads from around it is not looked at.
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
