"""Documents from places: text and code files, folders, JSON lines, Python's own library.

A document is a pair ``(name, text)``; the name says where an error is to be looked for. Which files
are read is settled first, in a sorted order, so that the same folder gives the same documents on
every machine; the texts are then read one at a time. Documents without text are left out.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "read_documents",
    "stdlib_documents",
    "stdlib_files",
    "text_documents",
    "text_files",
]

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SUFFIXES = (
    ".txt .md .rst .tex .jsonl .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .jl .r .rb "
    ".php .cs .swift .kt .scala .lua .pl .sh .sql .hs .ml .lisp .html .css"
)
"""What is read from a folder. A file that is named itself is read whatever it is called."""

_SUFFIXES = frozenset(SUFFIXES.split())
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_NOT_EVERYWHERE = frozenset({"lib2to3"})  # left the standard library in 3.13


def text_documents(paths: Paths) -> Iterator[tuple[str, str]]:
    """Read documents from files and folders, in a fixed order.

    Args:
        paths: Files and folders, or one of them. A ``.jsonl`` file gives a document per line, from
            its ``text``; every other file is one document. Folders are searched for the usual
            suffixes of text and code; hidden files are left out; a file found twice counts once.

    Returns:
        An iterator of ``(name, text)``.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder holds nothing to read.
        ValueError: On reading, if a file is not UTF-8, a line is not a JSON object with a string
            ``text``, or no document has any text.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("once upon a time")
        ...     [text for name, text in text_documents(folder)]
        ['once upon a time']
    """
    return read_documents(text_files(paths))


def stdlib_documents() -> Iterator[tuple[str, str]]:
    """Read the sources of Python's standard library: 661 files, 11.8 MB, in Python 3.11.

    They are on every machine that runs Python, so a first run needs no download.
    """
    return read_documents(stdlib_files())


def text_files(paths: Paths) -> list[Path]:
    """List the files that ``text_documents`` reads, in its order."""
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise ValueError("no paths were given; name at least one file or folder.")
    unique: dict[Path, Path] = {}
    for path in named:
        for file in _files_of(Path(path)):
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def stdlib_files() -> list[Path]:
    """List the sources of Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = _NOT_LIBRARY | _NOT_EVERYWHERE
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / file for file in sorted(files) if not left_out & set(file.parts)]


def read_documents(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Read ``(name, text)`` from each file; raise if there is no text in any of them."""
    count = 0
    files = list(files)
    for file in files:
        read = _read_lines if file.suffix.lower() == ".jsonl" else _read_file
        for name, text in read(file):
            if text.strip():
                count += 1
                yield name, text
    if not count:
        raise ValueError(
            f"{len(files)} files hold no text (first: {files[0] if files else None}). "
            "Name files with at least one character that is not white space."
        )


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name an existing file or folder.")
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


def _read_file(file: Path) -> Iterator[tuple[str, str]]:
    yield str(file), _decode(file.read_bytes(), str(file))


def _read_lines(file: Path) -> Iterator[tuple[str, str]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                name = f"{file}:{number}"
                yield name, _text_of(_decode(line, name), name)


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}. "
            "Convert it (iconv -t UTF-8) or leave it out."
        ) from None


def _text_of(line: str, name: str) -> str:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            record["text"].encode()  # half of a surrogate pair is JSON and no text
            return record["text"]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} cannot be read as JSON: {error}. "
            "Each line must be one JSON object; mend the line or remove it."
        ) from None
    keys = ", ".join(f'"{key}"' for key in record) if isinstance(record, dict) else "no keys"
    raise ValueError(
        f'{name} has no string "text"; it is a {type(record).__name__} with {keys or "no keys"}. '
        'Each line must look like {"text": "..."}.'
    )
