"""Documents from files: text and code, folders, JSON lines, parquet, Python's own library.

Files are listed first, sorted, so the same folder gives the same documents on every machine; texts
are then read one at a time. A document is named by its file and its line or row, also in errors.
Documents without text are left out.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.file_formats import Raw, reader_of
from forgekit.data.documents.protocol import Errors, Record, check_reading
from forgekit.inputs import path_of

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SUFFIXES = (
    ".txt .md .rst .tex .jsonl .parquet .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .jl "
    ".r .rb .php .cs .swift .kt .scala .lua .pl .sh .sql .hs .ml .lisp .html .css"
)
"""Read from a folder. A file that is passed by name is read whatever its suffix."""

_SUFFIXES = frozenset(SUFFIXES.split())
# lib2to3 left the standard library in 3.13
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}


def text_documents(
    paths: Paths, *, text_key: str = "text", errors: Errors = "raise"
) -> TextDocuments:
    """List documents in files and folders, in a fixed order.

    Args:
        paths: Files and folders, or one of them. A ``.jsonl`` file gives a document per line, a
            ``.parquet`` file one per row; every other file is one document. Folders are searched
            for the usual suffixes of text and code, hidden files excepted. A file found twice
            counts once.
        text_key: Key of the text in a line of JSON, or its column in parquet.
        errors: ``"raise"`` stops at a broken document, ``"skip"`` leaves it out; ``prepare`` and
            ``stream_documents`` count and name what was left out.

    Returns:
        The documents; iterating reads pairs of name and text, one at a time, each time again.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder holds nothing to read.
        ValueError: If ``errors`` is neither of the two. On reading, if a file or line is not UTF-8,
            a line is not a JSON object with a string under ``text_key``, or no document has text.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("once upon a time")
        ...     [text for name, text in text_documents(folder)]
        ['once upon a time']
    """
    check_reading(text_key, errors)
    return TextDocuments(tuple(_text_files(paths)), text_key, errors)


def stdlib_documents() -> TextDocuments:
    """List the sources of Python's standard library: 661 files, 11.8 MB, in Python 3.11.

    Every machine with Python has them, so a first run needs no download. Tests and installed
    packages are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return TextDocuments(
        tuple(root / file for file in files if _NOT_LIBRARY.isdisjoint(file.parts))
    )


@attrs.frozen
class TextDocuments:
    """Documents in files; ``text_documents`` makes one.

    A position is ``[file, within, number, seen]``: the file's number; the bytes or rows of it that
    were read; its lines or rows so far; and the documents of all readers so far.

    Attributes:
        files: The files, in reading order.
        text_key: Key of the text in JSON and parquet.
        errors: Whether broken documents raise or are skipped.
    """

    files: tuple[Path, ...] = attrs.field(repr=lambda files: f"<{len(files)} files>")
    text_key: str = "text"
    errors: Errors = "raise"

    @property
    def fingerprint(self) -> str:
        """Hash of the files' names, sizes and modification times, and of the key."""
        facts = [self.text_key]
        for file in self.files:
            status = file.stat()
            facts.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256(os.fsencode("\n".join(facts))).hexdigest()

    @property
    def size(self) -> int | None:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        is_empty, broken = True, ""
        for record in self.read():
            if isinstance(record.content, str):
                is_empty = False
                yield record.name, record.content
            elif record.problem and not broken:
                broken = f" {record.problem}"
        if is_empty:
            raise ValueError(
                f"{len(self.files)} files hold no text (first: {next(iter(self.files), None)})."
                f"{broken} Name files with at least one character that is not white space."
            )

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Yield this part's documents from a position on; see ``Documents``."""
        first, within, number, seen = position or (0, 0, 0, 0)
        begins = [0, *accumulate(file.stat().st_size for file in self.files)]
        for index, file in enumerate(self.files[first:], start=first):
            for raw in reader_of(file)(file, within, number, self.text_key):
                is_mine, seen = seen % parts == part, seen + 1
                if not is_mine:
                    continue
                text, problem = self._load(raw)
                if problem or (text and not text.isspace()):
                    after = [index, raw.position, raw.number, seen]
                    yield Record(raw.name(), text, after, begins[index] + raw.bytes, problem)
            within, number = 0, 0

    def _load(self, raw: Raw) -> tuple[str | None, str | None]:
        try:
            return raw.load(), None
        except ValueError as error:
            if self.errors == "raise":
                raise
            return None, str(error)


def _text_files(paths: Paths) -> list[Path]:
    """List the files to read, each once, in a fixed order."""
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise ValueError("no paths were given; name at least one file or folder.")
    unique: dict[Path, Path] = {}
    for path in named:
        for file in _files_of(path_of("a path", path)):
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name an existing file or folder.")
    if not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder, but a pipe or a device; save it.")
    found = sorted(file.relative_to(path) for file in path.rglob("*"))
    files = [path / file for file in found if _is_wanted(path / file, file)]
    if not files:
        raise FileNotFoundError(
            f"{path} holds no file to read among {len(found)} entries. Folders are searched for "
            f"{SUFFIXES}; name other files themselves."
        )
    return files


def _is_wanted(path: Path, relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and relative.suffix.lower() in _SUFFIXES and path.is_file()
