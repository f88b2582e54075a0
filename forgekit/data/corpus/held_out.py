"""The texts to prepare, in two parts: those to train on and those that are held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.filters import Account, Filters, Kept
from forgekit.data.documents.protocol import Documents
from forgekit.data.hashing import hash_integers

__all__ = ["Parts", "Place", "Progress"]

Progress: TypeAlias = Callable[[str, int, int], None]

REPORT_BYTES = 1 << 18
"""What is read between two reports of progress."""


@attrs.frozen
class Place:
    """Where reading stands after a document.

    Attributes:
        after: Where the source is read on.
        documents: Documents kept up to there.
        account: What was left out up to there.
    """

    after: Any = None
    documents: int = 0
    account: Account = attrs.field(factory=Account)


@attrs.frozen
class Parts:
    """Documents and how they are divided. Every ``held_out_every``-th that is kept is held out.

    Fewer documents than that are each cut instead, at a line break.
    """

    documents: Documents
    filters: Filters
    held_out_every: int
    report: Progress

    def allows(self, account: Account) -> bool:
        """Say whether so much may be left out: broken documents are fatal to some sources."""
        return not account.broken or getattr(self.documents, "errors", "raise") == "skip"

    def keep(self, account: Account) -> Kept:
        """Begin to read the documents that are kept."""
        return Kept(self.documents, self.filters, account)

    def texts(self, stage: str, kept: Kept, place: Place) -> Iterator[tuple[Place, bool, str]]:
        """Yield texts after a place: where each document stands, and whether it is held out.

        Raises:
            ValueError: If there are none, from the start on.
        """
        few = self._are_few()
        number, total = place.documents, self.documents.size or 0
        read, reported = 0, -REPORT_BYTES
        for record, text, account in kept.read(place.after):
            number, read = number + 1, read + len(text)
            done = record.done if total else read
            if done - reported >= REPORT_BYTES:
                self.report(stage, done, total)
                reported = done
            here = Place(record.after, number, account)
            if few:
                for part, is_end in _cut(text, self.held_out_every):
                    yield here, is_end, part
            else:
                yield here, number % self.held_out_every == 0, text
        if not number:
            raise _nothing(kept.account)
        self.report(stage, total or read, total)

    def sample(self, stage: str, limit: int) -> Iterator[str]:
        """Yield training texts of so many characters in all; of more, each is taken by chance."""
        size = self.documents.size or 0
        threshold = 2**64 * limit // max(size, limit)
        for place, is_held_out, text in self.texts(stage, self.keep(Account()), Place()):
            is_taken = size <= limit or int(hash_integers(place.documents)) < threshold
            if is_taken and not is_held_out:
                yield text[:limit]
                limit -= len(text)
                if limit <= 0:
                    return

    def _are_few(self) -> bool:
        first = islice(self.keep(Account()).read(None), self.held_out_every)
        return sum(1 for _ in first) < self.held_out_every


def _cut(text: str, every: int) -> list[tuple[str, bool]]:
    """Hold out the end of a text, from the last line break that leaves at least its share."""
    latest = len(text) - max(1, len(text) // every)
    place = text.rfind("\n", 0, latest) + 1 or latest
    return [
        (part, is_end) for part, is_end in ((text[:place], False), (text[place:], True)) if part
    ]


def _nothing(account: Account) -> ValueError:
    first = f" (first: {account.first_broken[0]})" if account.broken else ""
    dropped = "".join(f", {count} dropped by {name!r}" for name, count in account.dropped.items())
    return ValueError(
        f"there is no text to prepare: {account.broken} documents are broken{first}{dropped}. "
        "Name files with at least one character that is not white space."
    )
