"""The texts to prepare, divided into training texts and held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.filters import Account, Filters, read_filtered
from forgekit.data.documents.protocol import Documents, Record
from forgekit.data.hashing import hash_integers

Progress: TypeAlias = Callable[[str, int, int], None]

REPORT_BYTES = 1 << 18
"""Bytes that are read between two reports of progress."""


@attrs.frozen
class SourcePosition:
    """The position of ``prepare`` after a document.

    Attributes:
        after: The position in the source.
        documents: Documents kept up to there.
        account: What was left out up to there.
    """

    after: Any = None
    documents: int = 0
    account: Account = attrs.field(factory=Account)


@attrs.frozen
class HeldOutSplit:
    """Documents, and how they are divided: every ``held_out_every``-th kept one is held out.

    If there are fewer documents than that, the end of each is held out instead, from a line break.
    """

    documents: Documents
    filters: Filters
    held_out_every: int
    report: Progress

    def allows(self, account: Account) -> bool:
        """Whether this may be left out: with ``errors="raise"`` a broken document is fatal."""
        return not account.broken or getattr(self.documents, "errors", "raise") == "skip"

    def texts(
        self, task: str, start: SourcePosition
    ) -> Iterator[tuple[SourcePosition, bool, str | None]]:
        """Yield texts from a position on.

        Yields:
            The position after the text; whether it is held out; and the text, None for a document
            that is left out.

        Raises:
            ValueError: If there is no text, from the start on.
        """
        are_few = self._are_few()
        number, total = start.documents, self.documents.size or 0
        read, reported = 0, -REPORT_BYTES
        account = start.account
        for record, text, account in self._read(start):
            if text is not None:
                number, read = number + 1, read + len(text)
            done = record.done if total else read
            if done - reported >= REPORT_BYTES:
                self.report(task, done, total)
                reported = done
            position = SourcePosition(record.after, number, account)
            if text is None or not are_few:
                yield position, number % self.held_out_every == 0, text
                continue
            split = _split_point(text, self.held_out_every)
            for is_held_out, part in enumerate((text[:split], text[split:])):
                if part:
                    yield position, bool(is_held_out), part
        if not number:
            raise _nothing(account)
        self.report(task, total or read, total)

    def sample(self, task: str, limit: int) -> Iterator[str]:
        """Yield training texts of ``limit`` characters in all, from all over a larger source."""
        size = self.documents.size or 0
        # Each document is drawn by a hash of its number, with probability limit / size.
        threshold = 2**64 * limit // max(size, limit)
        for position, is_held_out, text in self.texts(task, SourcePosition()):
            is_drawn = size <= limit or int(hash_integers(position.documents)) < threshold
            if is_drawn and not is_held_out and text is not None:
                yield text[:limit]
                limit -= len(text)
                if limit <= 0:
                    return

    def _are_few(self) -> bool:
        kept = (text for _, text, _ in self._read(SourcePosition()) if text is not None)
        return sum(1 for _ in islice(kept, self.held_out_every)) < self.held_out_every

    def _read(self, start: SourcePosition) -> Iterator[tuple[Record, str | None, Account]]:
        return read_filtered(self.documents, self.filters, start.after, start.account)


def _split_point(text: str, every: int) -> int:
    """Find the last line break that leaves at least ``1 / every`` of the text behind it."""
    latest = len(text) - max(1, len(text) // every)
    return text.rfind("\n", 0, latest) + 1 or latest


def _nothing(account: Account) -> ValueError:
    first = f" (first: {account.first_broken[0]})" if account.broken else ""
    dropped = "".join(f", {count} dropped by {name!r}" for name, count in account.dropped.items())
    return ValueError(
        f"there is no text to prepare: {account.broken} documents are broken{first}{dropped}. "
        "Name files with at least one character that is not white space."
    )
