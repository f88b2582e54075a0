"""The folder that ``prepare`` makes: which files belong to it, and how to open it."""

from __future__ import annotations

from pathlib import Path

import attrs

from forgekit.data.corpus.token_files import HELD_OUT, TokenFile, is_token_file, open_tokens
from forgekit.data.documents.filters import Account

TOKENIZER = "tokenizer.json"


@attrs.frozen
class Prepared:
    """The token files that ``prepare`` made or found.

    Attributes:
        path: The token file of the training documents.
        train: The training documents.
        held_out: The held-out documents.
        is_new: False if it existed, made from the same documents with the same settings.
    """

    path: Path
    train: TokenFile = attrs.field(repr=False)
    held_out: TokenFile = attrs.field(repr=False)
    is_new: bool

    @property
    def account(self) -> Account:
        """The documents that were left out: broken ones, and those that filters dropped."""
        kept = self.train.metadata
        return Account(kept["broken"], tuple(kept["first_broken"]), kept["dropped"])


def open_prepared(out: Path, *, is_new: bool) -> Prepared:
    """Open both token files."""
    return Prepared(out, open_tokens(out), open_tokens(out / HELD_OUT), is_new)


def is_prepared(out: Path) -> bool:
    """Whether a directory is what ``prepare`` makes and holds nothing else."""
    return (
        (out / TOKENIZER).is_file()
        and is_token_file(out / HELD_OUT)
        and is_token_file(out, besides={HELD_OUT, TOKENIZER})
    )


def find_prepared(out: Path, made_from: str) -> Prepared | None:
    """Open an existing folder if it is complete and was made from exactly this, else None."""
    if not is_prepared(out):
        return None
    try:
        found = open_prepared(out, is_new=False)
        _ = found.account
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if found.train.metadata.get("made_from") == made_from else None
