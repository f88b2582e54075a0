"""The folder that ``prepare`` makes: which files belong to it, and what is known of it."""

from __future__ import annotations

from pathlib import Path

import attrs

from forgekit.data.corpus.token_files import TokenFile, is_token_file, open_tokens
from forgekit.data.documents.filters import Account

__all__ = ["HELD_OUT", "TOKENIZER", "Prepared", "find_prepared", "is_prepared", "open_prepared"]

HELD_OUT = "heldout"
TOKENIZER = "tokenizer.json"


@attrs.frozen
class Prepared:
    """What ``prepare`` made, or found.

    Attributes:
        path: The token file of the training documents.
        train: The training documents.
        held_out: The held-out documents.
        is_new: False if it was there already, made from the same documents with the same settings.
    """

    path: Path
    train: TokenFile = attrs.field(repr=False)
    held_out: TokenFile = attrs.field(repr=False)
    is_new: bool

    @property
    def account(self) -> Account:
        """What was left out: broken documents, and those that filters dropped."""
        kept = self.train.metadata
        return Account(kept["broken"], tuple(kept["first_broken"]), kept["dropped"])


def open_prepared(out: Path, *, is_new: bool) -> Prepared:
    """Open both token files."""
    return Prepared(out, open_tokens(out), open_tokens(out / HELD_OUT), is_new)


def is_prepared(out: Path) -> bool:
    """Say whether a directory is what ``prepare`` makes and holds nothing else."""
    return (
        (out / TOKENIZER).is_file()
        and is_token_file(out / HELD_OUT)
        and is_token_file(out, besides={HELD_OUT, TOKENIZER})
    )


def find_prepared(out: Path, made_from: str) -> Prepared | None:
    """Open what is there if it is whole and was made from just that, else None."""
    if not is_prepared(out):
        return None
    try:
        found = open_prepared(out, is_new=False)
        _ = found.account
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if found.train.metadata.get("made_from") == made_from else None
