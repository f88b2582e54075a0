"""Documents from files and URLs: text and code, folders, records in files, Python's own library.

Files are listed first, sorted, so the same folder gives the same documents on every machine; texts
are then read one at a time. A document is named by its file and its line or row, also in errors.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from types import MappingProxyType
from typing import Any, BinaryIO, TypeAlias, get_args

import attrs

from forgekit.checks import brief, check_choice, parse_json, quoted
from forgekit.data.documents import (
    ROWS_AT_ONCE,
    Errors,
    Located,
    Record,
    check_cell,
    check_column,
    read_texts,
)
from forgekit.environment import require
from forgekit.remote.remote_files import COMPRESSED, File, RemoteFile, opened
from forgekit.remote.urls import Url, fs_of, location_of, retried

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SUFFIXES = (
    ".txt .md .rst .tex .jsonl .ndjson .jsonlines .parquet .py .pyi .c .h .cc .cpp .hpp .cu "
    ".rs .go .java .js .ts .jl .r .rb .php .cs .swift .kt .scala .lua .pl .sh .sql .hs "
    ".ml .lisp .html .css"
)
"""Read from a folder, also compressed. A file passed by name is read whatever its suffix."""

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
JSON = (*JSON_LINES, ".json")
TABLES = {".csv": ",", ".tsv": "\t"}
"""Tables in text, by their delimiter."""

BEGINNING = 2**10
"""Bytes of a first line that say whether it begins an array."""

DAMAGED = 2**62
"""The position in a file behind its damage, from which nothing more is read."""

# lib2to3 left the standard library in 3.13
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}


def text_documents(
    paths: Paths, *, text_key: str = "text", errors: Errors = "raise"
) -> TextDocuments:
    """List documents in files and folders, in a fixed order.

    Args:
        paths: Files and folders, or one of them; also URLs. JSON lines (``.jsonl``,
            ``.ndjson``, ``.jsonlines``, ``.json``) give a document per line, an array in such a
            file one per record, ``.parquet``, ``.csv`` and ``.tsv`` one per row; every other file,
            also a ``.json`` of one object without the key, is one document. Files that end in
            ``.gz``, ``.bz2``, ``.xz`` or (with pyarrow) ``.zst`` are decompressed. Folders
            are searched for the usual suffixes of text and code, hidden files excepted, and not for
            ``.json`` and tables. A file found twice counts once.
        text_key: Key of the text in a record of JSON, or its column in a table.
        errors: ``"raise"`` stops at a broken document, ``"skip"`` leaves it out; ``prepare`` and
            ``stream_documents`` count and name what was left out.

    Returns:
        The documents; iterating reads pairs of name and text, one at a time, each time again.
        Documents without text are left out.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder holds nothing to read.
        ValueError: If ``errors`` is neither of the two. On reading, if a file or line is not UTF-8,
            a line is not a JSON object with a string under ``text_key``, or a file of another
            suffix begins with such an object.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "a.txt").write_text("once upon a time")
        ...     [text for name, text in text_documents(folder)]
        ['once upon a time']
    """
    check_choice("errors", errors, get_args(Errors))
    return TextDocuments(tuple(files_at(paths)), text_key, errors)


def stdlib_documents() -> TextDocuments:
    """List the sources of Python's standard library: 661 files, 11.8 MB, in Python 3.11.

    Every machine with Python has them, so a first run needs no download. Tests and installed
    packages are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = (name for name in folders if name not in _NOT_LIBRARY)  # not looked into
        files += (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))
    return TextDocuments(tuple(root / file for file in sorted(files)))


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

    files: tuple[File, ...] = attrs.field(repr=lambda files: f"<{len(files)} files>")
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

    @property
    def kinds(self) -> Counter[str]:
        """Count the files by what they are read as."""
        return Counter(_kind_of(file, self.text_key) for file in self.files)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((r.name, r.content) for r in self.read() if isinstance(r.content, str))

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Yield this part's documents from a position on; see ``Documents``."""
        return read_texts(self._locate(position, part, parts), self.errors)

    def _locate(self, position: Any, part: int, parts: int) -> Iterator[Located]:
        first, within, number, seen = position or (0, 0, 0, 0)
        begins = [0, *itertools.accumulate(file.stat().st_size for file in self.files)]
        for index, file in enumerate(self.files[first:], start=first):
            located = _until_damage(_located(file, within, number, self.text_key), file)
            for name, read, after, done in located:
                is_mine, seen = seen % parts == part, seen + 1
                if is_mine:
                    bytes_read = min(begins[index] + done, begins[index + 1])
                    yield name, read, [index, *after, seen], bytes_read
            within, number = 0, 0


def json_objects(file: File) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the record of each line of JSON, element of an array, or row of a table.

    Raises:
        ValueError: If a line is not UTF-8, or not one JSON object.
    """
    for name, read, *_ in _until_damage(_located(file, 0, 0, None), file):
        record: Any = read()
        if not isinstance(record, dict):
            raise ValueError(f"{name} is {brief(record)}; each must be one JSON object.")
        yield name, record


def _kind_of(file: File, key: str | None) -> str:
    """Say what a file is read as."""
    suffix = _plain_suffix(file)
    if suffix not in JSON:
        return suffix[1:] if suffix in (".parquet", *TABLES) else "text"
    try:
        with opened(file) as stream:
            return _kind_of_json(suffix, stream, key)
    except Exception as error:
        _damage_of(file, error)  # raises what is no damage; reading names that
        return "JSON lines"


def _kind_of_json(suffix: str, stream: BinaryIO, key: str | None) -> str:
    """Say what a file of JSON is read as, by its suffix and its first line."""
    pieces = iter(partial(stream.readline, BEGINNING), b"")
    filled = (piece for piece in pieces if _without_bom(piece).strip())
    line = next(filled, b"")
    first = _without_bom(line).strip()
    if re.match(rb"\[\s*(\{|$)", first) or (suffix == ".json" and first.startswith(b"[")):
        return "JSON array"
    if suffix in JSON_LINES:
        return "JSON lines"
    line = line if line.endswith(b"\n") else line + stream.readline()
    try:
        record = json.loads(_without_bom(line))
    except (ValueError, RecursionError):
        return "text" if key or not first.startswith(b"{") else "JSON array"
    is_record = isinstance(record, dict) and (key is None or key in record or any(filled))
    return "JSON lines" if is_record else "text"


@contextmanager
def _opened_as(file: File, key: str | None) -> Iterator[tuple[str, BinaryIO]]:
    """Open a file at its beginning, once if that can be; say what it is read as."""
    with opened(file) as stream:
        suffix = _plain_suffix(file)
        kind = _kind_of_json(suffix, stream, key) if suffix in JSON else _kind_of(file, key)
        if stream.seekable():
            stream.seek(0)
            yield kind, stream
            return
    with opened(file) as stream:  # a zstd stream
        yield kind, stream


# A format locates documents from a position on: each reader parses its share. Without a key it
# reads records, with one their texts. Positions in a file are pairs: bytes, characters or rows that
# were read, and lines, elements or rows so far.


def _located(file: File, position: int, number: int, key: str | None) -> Iterator[Located]:
    if position == DAMAGED:
        return
    suffix = _plain_suffix(file)
    if suffix == ".parquet":
        yield from _rows(file, position, key)
        return
    if key is None or suffix in (*JSON, *TABLES):
        with _opened_as(file, key) as (kind, stream):
            if key is None or kind != "text":
                yield from _READERS.get(kind, _lines)(file, stream, position, number, key)
                return
    if key is not None and not position:
        yield str(file), partial(_text_of_file, file, key), (1, 1), file.stat().st_size


def _lines(
    file: File, lines: BinaryIO, position: int, number: int, key: str | None
) -> Iterator[Located]:
    _skip(lines, position)
    for line in lines:
        position, number = position + len(line), number + 1
        if _without_bom(line).strip():
            name = f"{file}:{number}"
            yield name, partial(_record, line, name, key), (position, number), position


def _array(
    file: File, stream: BinaryIO, position: int, number: int, key: str | None
) -> Iterator[Located]:
    """Locate the elements of an array; its text is in memory as a whole, its values are not."""
    text = stream.read().decode("utf-8-sig")
    size, values = file.stat().st_size, json.JSONDecoder()
    is_array = text.lstrip().startswith("[")
    start = re.compile(r"\s*" + r"\[?" * is_array + r"\s*")
    follows = re.compile(r"\s*(,\s*(?!\])|(?=\]))" if is_array else r"\s*")
    position = position or start.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
    while position < len(text) and text[position] != "]":
        first, (_, end) = position, values.raw_decode(text, position)
        if (behind := follows.match(text, end)) is None:
            raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
        position, name = behind.end(), f"{file}[{number}]"
        number += 1
        read = partial(_record, text[first:end].encode(errors="surrogatepass"), name, key)
        yield name, read, (position, number), size * position // len(text)
    if text[position + is_array :].strip() or (is_array and position == len(text)):
        raise json.JSONDecodeError("Expecting ']' at the end", text, position)


def _table(
    file: File, lines: BinaryIO, position: int, number: int, key: str | None
) -> Iterator[Located]:
    """Locate the rows of a table in text whose first row names its columns."""
    read = 0

    def decoded() -> Iterator[str]:
        nonlocal read
        for line in lines:  # a row takes its own lines and none ahead
            read += len(line)
            if b"\0" in line:
                raise csv.Error("it holds a NUL byte, so it is cut off, binary or in UTF-16")
            yield line.decode("utf-8-sig" if read == len(line) else "utf-8")

    options: Any = {"delimiter": TABLES[_plain_suffix(file)], "strict": True}
    rows = filter(None, _unlimited(csv.reader(decoded(), **options)))
    columns = next(rows, [])
    if key is not None:
        check_column(str(file), key, columns)
    if len(set(columns)) < len(columns):
        raise ValueError(f"{file} names a column twice: {quoted(columns)}. Rename one.")
    if position:
        _skip(lines, position - read)
        read = position
    for row in rows:
        number += 1
        cells: dict[str, Any] = dict(zip(columns, row, strict=False))
        is_whole = len(row) == len(columns)
        name = f"{file}[{number - 1}]"
        yield name, partial(_cell, name, key, cells, is_whole), (read, number), read


def _unlimited(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield rows with cells of any length: the limit is the process's, and lifted for one row."""
    row: list[str] | None = []
    while row is not None:
        with _ONE_LIMIT:
            limit = csv.field_size_limit(2**31 - 1)
            try:
                row = next(rows, None)
            finally:
                csv.field_size_limit(limit)
        yield row or []


_ONE_LIMIT = threading.Lock()


def _cell(name: str, key: str | None, cells: dict[str, Any], is_whole: bool) -> Any:
    if not is_whole:
        raise ValueError(
            f"{name} has not as many cells as the first row has columns: {brief(cells)}. "
            "Quote cells that hold the delimiter, or remove the row."
        )
    return cells if key is None else cells[key]


def _skip(stream: BinaryIO, count: int) -> None:
    if stream.seekable():
        stream.seek(count, os.SEEK_CUR)
    else:  # a zstd stream
        for start in range(0, count, 2**20):
            stream.read(min(2**20, count - start))


def _rows(file: File, position: int, key: str | None) -> Iterator[Located]:
    parquet, size = require("pyarrow.parquet", extra="data"), file.stat().st_size
    is_local = isinstance(file, Path)
    source, options = file if is_local else file.open(), {"page_checksum_verification": True}
    with parquet.ParquetFile(source, memory_map=is_local, **options) as table:
        if key is not None:
            check_column(str(file), key, table.schema_arrow.names)
        columns = None if key is None else [key]
        first, rows = 0, table.metadata.num_rows
        for group in range(table.num_row_groups):
            last = first + table.metadata.row_group(group).num_rows
            if position < last:  # a larger group is read in pieces
                for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    for row in range(max(position, first), first + batch.num_rows):
                        name, at = f"{file}[{row}]", row - first
                        if key is None:
                            read = batch.slice(at, 1).to_pylist()[0].copy
                        else:
                            read = partial(check_cell, name, key, batch[0][at].as_py())
                        yield name, read, (row + 1,) * 2, size * (row + 1) // rows
                    first += batch.num_rows
            first = last


_READERS = MappingProxyType(
    {"JSON lines": _lines, "JSON array": _array, "csv": _table, "tsv": _table}
)


def _text_of_file(file: File, key: str) -> str:
    try:
        with opened(file) as stream:
            content = stream.read()
    except Exception as error:
        raise _damage_of(file, error) from None
    if (position := content.find(0)) >= 0:
        raise ValueError(
            f"{file} holds a NUL byte at position {position}: it is binary, or text in UTF-16. "
            "Convert it (iconv -t UTF-8) or leave it out."
        )
    text = _utf8(content, str(file))
    if isinstance(_first_value(text).get(key), str):
        raise ValueError(
            f"{file} begins with a record of JSON that has {brief(key)}, and its name does not say "
            "so. Rename it to .jsonl, with a record per line."
        )
    return text


def _first_value(text: str) -> dict[str, Any]:
    """Parse the object that a text begins with; empty if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text)[0] if text.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}


def _without_bom(line: bytes) -> bytes:
    return line.removeprefix(codecs.BOM_UTF8)


def _record(line: bytes, name: str, key: str | None) -> Any:
    record = _parse_line(line, name)
    if key is None:
        return record
    if isinstance(record, dict) and isinstance(record.get(key), str):
        return record[key]
    named = json.dumps(key, ensure_ascii=False)
    raise ValueError(
        f"{name} has no string {named}; it is {brief(record)}. "
        f'Each line must look like {{{named}: "..."}}.'
    )


def _parse_line(line: bytes, name: str) -> Any:
    text = _utf8(line.rstrip(), name)
    try:
        record = parse_json(text)
        if "\\u" in text:  # half a surrogate pair is valid JSON but no text
            json.dumps(record, ensure_ascii=False).encode()
    except ValueError as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):  # its own text would say "line 1"
            problem = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(
            f"{name} cannot be read as JSON: {problem}. "
            "Each line must be one JSON object; mend the line or remove it."
        ) from None
    return record


def _utf8(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}. "
            "Convert it (iconv -t UTF-8) or leave it out."
        ) from None


def _until_damage(located: Iterator[Located], file: File) -> Iterator[Located]:
    """Yield what was located; damage is one more document, which cannot be read."""
    try:
        yield from located
    except Exception as error:
        damage = _damage_of(file, error)

        def read() -> str:
            raise damage

        yield str(file), read, (DAMAGED, 0), file.stat().st_size


def _damage_of(file: File, error: Exception) -> ValueError:
    """Name a damaged file; errors of the disk, which have a number, are raised as they are."""
    pyarrow = sys.modules.get("pyarrow")
    broken: Any = (EOFError, zlib.error, OSError, UnicodeError, json.JSONDecodeError, csv.Error)
    lzma = sys.modules.get("lzma")
    kinds = (
        *broken,
        *([lzma.LZMAError] if lzma else []),
        *([pyarrow.ArrowException] if pyarrow else []),
    )
    if not isinstance(error, kinds) or getattr(error, "errno", None):
        raise error
    problem = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{file} cannot be read: {problem}. Write it again.")


def files_at(paths: Paths) -> list[File]:
    """List the files to read, each once, in a fixed order."""
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    unique: dict[File, File] = {}
    for path in named:
        location = location_of("a path", path)
        is_local = isinstance(location, Path)
        for file in _files_in(location) if is_local else _files_behind(location):
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name an existing file or folder.")
    entries = sorted(file.relative_to(path) for file in path.rglob("*"))
    files = [path / file for file in entries if _is_wanted(file) and (path / file).is_file()]
    return files or _none_among(path, len(entries))


def _files_behind(url: Url) -> list[RemoteFile]:
    fs, root = fs_of(url)
    facts = retried(lambda: fs.find(root, detail=True), url)
    files = {PurePosixPath(name).relative_to(root): fact for name, fact in facts.items()}
    if not files:
        raise FileNotFoundError(f"{url} does not exist; name an existing file or folder.")
    is_file = list(files) == [PurePosixPath()]
    wanted = [file for file in sorted(files) if is_file or _is_wanted(file)]
    listed = ((url if is_file else url / file, files[file]) for file in wanted)
    return [RemoteFile(u, fact["size"], _stamp(fact)) for u, fact in listed] or _none_among(
        url, len(files)
    )


def _stamp(facts: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "LastModified", "mtime", "created")
    return str(next((facts[key] for key in keys if facts.get(key)), ""))


def _none_among(path: Path | Url, entries: int) -> Any:
    raise FileNotFoundError(
        f"{path} holds no file to read among {entries} entries. Folders are searched for "
        f"{SUFFIXES}; name other files themselves."
    )


def _is_wanted(relative: PurePath) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and _plain_suffix(relative) in SUFFIXES.split()


def _plain_suffix(file: File | PurePath) -> str:
    """The suffix in lower case, below that of a compressed file."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix
