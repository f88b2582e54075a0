"""From sources to what a training run reads: token files and their tokenizer, in one go.

The result appears whole, under its name, or not at all::

    OUT/                 a token file: the training documents
    OUT/heldout/         a token file: every 20th document, never trained on
    OUT/tokenizer.json   trained on the training documents only
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.data.atomic import atomic_directory
from forgekit.data.sources import Paths, read_documents, stdlib_files, text_files
from forgekit.data.tokenizer import END_OF_TEXT, train_tokenizer
from forgekit.data.tokens import TokenFile, is_token_file, open_tokens, write_tokens

__all__ = ["Prepared", "Progress", "prepare"]

Progress: TypeAlias = Callable[[str, int, int], None]

HELD_OUT = "heldout"
TOKENIZER = "tokenizer.json"
_AT_ONCE = 64


@attrs.frozen
class Prepared:
    """What ``prepare`` made, or found.

    Attributes:
        path: The token file of the training documents.
        train: The training documents.
        held_out: The held-out documents.
        is_new: False if it was there already, made from the same files with the same settings.
    """

    path: Path
    train: TokenFile = attrs.field(repr=False)
    held_out: TokenFile = attrs.field(repr=False)
    is_new: bool


def prepare(
    source: Literal["stdlib"] | Paths,
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    held_out_every: int = 20,
    progress: Progress | None = None,
) -> Prepared:
    """Train a tokenizer on documents and write them as token files.

    Sources are read three times, one document at a time: for the tokenizer, for the training
    tokens, for the held-out tokens. Fewer documents than ``held_out_every`` are each cut instead:
    the end of each, at a line break, is held out.

    Args:
        source: ``"stdlib"`` for the sources of Python's standard library, or files and folders as
            for ``text_documents``.
        out: The directory to make. Made from the same files (names, sizes, times of change) with
            the same settings before, it is left as it is; else it is replaced when the new one is
            complete.
        vocab_size: Number of tokens, the end of text included.
        held_out_every: One document in so many is held out.
        progress: Called as ``progress(stage, done, total)``, in bytes of text.

    Returns:
        ``Prepared(path, train, held_out, is_new)``. Both token files keep ``text_bytes`` in their
        metadata, for losses in bits per byte; closing tokens count no bytes.

    Raises:
        FileNotFoundError: If a path does not exist or holds nothing to read.
        FileExistsError: If ``out`` holds anything that was not made here.
        ValueError: If a text cannot be read, a number is out of range, or there is too little text.
    """
    if held_out_every < 2:
        raise ValueError(f"held_out_every {held_out_every} must be at least 2, to leave something.")
    files = stdlib_files() if source == "stdlib" else text_files(source)
    made_from = _fingerprint(files, vocab_size, held_out_every)
    if (found := _find(Path(out), made_from)) is not None:
        return found
    parts = _Parts(files, held_out_every, progress or (lambda *_: None))
    with atomic_directory(out, is_replaceable=_is_prepared) as folder:
        tokenizer = train_tokenizer(parts.texts("tokenizer", held_out=False), vocab_size)
        for name, place in (("training tokens", folder), ("held-out tokens", folder / HELD_OUT)):
            _write(place, parts.texts(name, held_out=place != folder), tokenizer, made_from)
        tokenizer.save(str(folder / TOKENIZER))
    return _opened(Path(out), is_new=True)


@attrs.frozen
class _Parts:
    """The training and the held-out texts of some files, each as often as asked for."""

    files: list[Path]
    held_out_every: int
    progress: Progress

    def texts(self, stage: str, *, held_out: bool) -> Iterator[str]:
        total = sum(file.stat().st_size for file in self.files)
        done = 0
        for text, is_held_out in self._split():
            if is_held_out == held_out:
                yield text
            done += len(text.encode())
            self.progress(stage, min(done, total), total)
        self.progress(stage, total, total)

    def _split(self) -> Iterator[tuple[str, bool]]:
        every = self.held_out_every
        documents = (text for _, text in read_documents(self.files))
        first = list(itertools.islice(documents, every))
        if len(first) < every:
            first = [part for text in first for part in _cut(text, every)]
            yield from (part for part in first if part[0])
            return
        for number, text in enumerate(itertools.chain(first, documents), start=1):
            yield text, number % every == 0


def _cut(text: str, every: int) -> list[tuple[str, bool]]:
    """Hold out the end of a text, from the last line break that leaves at least its share."""
    latest = len(text) - max(1, len(text) // every)
    place = text.rfind("\n", 0, latest) + 1 or latest
    return [(text[:place], False), (text[place:], True)]


def _write(place: Path, texts: Iterable[str], tokenizer: Any, made_from: str) -> None:
    metadata: dict[str, Any] = {"text_bytes": 0, "made_from": made_from}
    write_tokens(
        place,
        _encode(texts, tokenizer, metadata),
        vocab_size=tokenizer.get_vocab_size(),
        eos_id=tokenizer.token_to_id(END_OF_TEXT),
        metadata=metadata,
    )


def _encode(
    texts: Iterable[str], tokenizer: Any, metadata: dict[str, Any]
) -> Iterator[NDArray[np.int64]]:
    """Encode texts a few at a time, which the tokenizer does in parallel, and count their bytes."""
    texts = iter(texts)
    while some := list(itertools.islice(texts, _AT_ONCE)):
        metadata["text_bytes"] += sum(len(text.encode()) for text in some)
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            yield np.asarray(encoding.ids, dtype=np.int64)


def _fingerprint(files: Iterable[Path], vocab_size: int, held_out_every: int) -> str:
    facts = [f"{vocab_size} {held_out_every}"]
    for file in files:
        status = file.stat()
        facts.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256(os.fsencode("\n".join(facts))).hexdigest()


def _find(out: Path, made_from: str) -> Prepared | None:
    if not _is_prepared(out):
        return None
    try:
        found = _opened(out, is_new=False)
    except (OSError, ValueError):
        return None
    return found if found.train.metadata.get("made_from") == made_from else None


def _is_prepared(out: Path) -> bool:
    """Say whether a directory is what ``prepare`` makes and holds nothing else."""
    return (
        (out / TOKENIZER).is_file()
        and is_token_file(out / HELD_OUT)
        and is_token_file(out, besides={HELD_OUT, TOKENIZER})
    )


def _opened(out: Path, *, is_new: bool) -> Prepared:
    return Prepared(out, open_tokens(out), open_tokens(out / HELD_OUT), is_new)
