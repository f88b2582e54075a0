"""Documents from files and URLs: text and code, folders, records in files, Python's own library.

Files are listed first, sorted, so the same folder gives the same documents on every machine; texts
are then read one at a time. A document is named by its file and its line or row, also in errors.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, TypeAlias, get_args

import attrs

from forgekit.checks import brief, check_choice, parse_json
from forgekit.data.batch import TEACHER
from forgekit.data.documents import (
    ROWS_AT_ONCE,
    Errors,
    Located,
    Record,
    check_cell,
    check_column,
    check_document,
    read_texts,
)
from forgekit.environment import require
from forgekit.remote.remote_files import COMPRESSED, File, RemoteFile, opened
from forgekit.remote.urls import Url, fs_of, location_of, retried

At: TypeAlias = "tuple[int, int]"
"""A position in a file: bytes, characters or rows read; and lines, elements or rows so far."""

Paths: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SUFFIXES = (
    ".txt .md .rst .tex .jsonl .ndjson .jsonlines .parquet .py .pyi .c .h .cc .cpp .hpp .cu "
    ".rs .go .java .js .ts .jl .r .rb .php .cs .swift .kt .scala .lua .pl .sh .sql .hs "
    ".ml .lisp .html .css"
)
"""Read from a folder, also compressed. A file passed by name is read whatever its suffix."""

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
JSON = (*JSON_LINES, ".json")
REFUSED = (".csv", ".tsv", ".zst")

DAMAGED = 2**62
"""The position in a file behind its damage, from which nothing more is read."""

# lib2to3 left the standard library in 3.13
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}


def text_documents(
    paths: Paths, *, text_key: str = "text", errors: Errors = "raise"
) -> TextDocuments:
    """List documents in files and folders, in a fixed order.

    Args:
        paths: Files, folders and URLs, or one of them. JSON lines (``.jsonl``, ``.ndjson``,
            ``.jsonlines``, ``.json``) give a document per line, an array in such a file one per
            record, ``.parquet`` one per row. Every other file, also a ``.json`` of one object
            without the key, is one document; ``.csv``, ``.tsv`` and ``.zst`` are refused. ``.gz``,
            ``.bz2`` and ``.xz`` are decompressed. Folders are searched for the usual suffixes of
            text and code, without hidden files, ``.json`` and tables. Each file is read once.
        text_key: Key of the text in a record of JSON, or its column in parquet. Records of JSON
            under ``"input_ids"`` are documents of token ids, with a teacher's rows where they have
            ``teacher_ids`` and ``teacher_log_probs``; see ``write_tokens``.
        errors: ``"raise"`` stops at a broken document, ``"skip"`` leaves it out.

    Returns:
        The documents; each iteration reads pairs of name and text, one at a time, and leaves out
        those without text.

    Raises:
        FileNotFoundError: If a path does not exist, or a folder holds nothing to read.
        ValueError: On reading, if a file or line is not UTF-8, a record has no string under
            ``text_key``, or a file of another suffix begins with such a record.

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
    """List the sources of Python's standard library, 12 MB that need no download; no tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = {*folders} - _NOT_LIBRARY  # not looked into
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    return TextDocuments(tuple(sorted(files)))


@attrs.frozen
class TextDocuments:
    """Documents in files; ``text_documents`` makes one.

    A position is ``[file, *at, seen]``: the number of the file, the position in it, and the
    documents of all readers so far.
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

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((r.name, r.content) for r in self.read() if isinstance(r.content, str))

    def read(self, position: Any = None, *, part: int = 0, parts: int = 1) -> Iterator[Record]:
        """Yield this part's documents from a position on; see ``Documents``."""
        return read_texts(self._locate(position, part, parts), self.errors)

    def _locate(self, position: Any, part: int, parts: int) -> Iterator[Located]:
        first, within, number, seen = position or (0, 0, 0, 0)
        at = within, number
        for index, file in enumerate(self.files[first:], start=first):
            for name, read, after in _located(file, at, self.text_key):
                is_mine, seen = seen % parts == part, seen + 1
                if is_mine:
                    yield name, read, [index, *after, seen]
            at = 0, 0


def json_objects(file: File) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and record of each line of JSON, element of an array, or row of parquet."""
    for name, read, _ in _located(file, (0, 0), None):
        record: Any = read()
        if not isinstance(record, dict):
            raise ValueError(f"{name} is {brief(record)}; it must be a JSON object.")
        yield name, record


def _kind_by(suffix: str, stream: Any, key: str | None) -> str:
    """Name a format by the suffix and, of JSON, by the first line."""
    if suffix not in JSON:
        return "text"
    pieces = iter(partial(stream.readline, 2**10), b"")  # an array may be one long line
    plain = (piece.removeprefix(codecs.BOM_UTF8) for piece in pieces)
    filled = (piece for piece in plain if piece.strip())
    line = next(filled, b"")
    first = line.strip()
    if re.match(rb"\[\s*(\{|$)", first) or (suffix == ".json" and first.startswith(b"[")):
        return "JSON array"
    if suffix in JSON_LINES:
        return "JSON lines"
    line = line if line.endswith(b"\n") else line + stream.readline()
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "text"
    is_record = isinstance(record, dict) and (key in (None, *record) or any(filled))
    return "JSON lines" if is_record else "text"


def _located(file: File, at: At, key: str | None) -> Iterator[Located]:
    """Locate documents; damage is one more document, which cannot be read."""
    try:
        yield from () if at[0] == DAMAGED else _intact(file, at, key)
    except Exception as error:
        damage = _damage_of(file, error)

        def read() -> str:
            raise damage

        yield str(file), read, (DAMAGED, 0)


def _intact(file: File, at: At, key: str | None) -> Iterator[Located]:
    """Locate texts from a position on, without a key records; each reader parses its share."""
    suffix = _plain_suffix(file)
    if suffix == ".parquet":
        yield from _rows(file, at[0], key)
        return
    if key is None or suffix in JSON:
        with opened(file) as stream:
            kind = _kind_by(suffix, stream, key)
            if key is None or kind != "text":
                stream.seek(0)
                yield from (_array if kind == "JSON array" else _lines)(file, stream, at, key)
                return
    if key is not None and not at[0]:
        yield str(file), partial(_text_of_file, file, key), (1, 1)


def _lines(file: File, lines: BinaryIO, at: At, key: str | None) -> Iterator[Located]:
    position, number = at
    lines.seek(position)
    for line in lines:
        position, number = position + len(line), number + 1
        if line.removeprefix(codecs.BOM_UTF8).strip():
            name = f"{file}:{number}"
            yield name, partial(_record, line, name, key), (position, number)


def _array(file: File, stream: BinaryIO, at: At, key: str | None) -> Iterator[Located]:
    """Locate the elements of an array; its text is in memory as a whole, its values are not."""
    text = stream.read().decode("utf-8-sig")
    begins, follows = re.compile(r"\s*\[\s*"), re.compile(r"\s*(,\s*(?!\])|(?=\]))")
    position, number = at if at[0] else (begins.match(text).end(), 0)  # pyright: ignore[reportOptionalMemberAccess]
    while not text.startswith("]", position):
        first, (_, end) = position, json.JSONDecoder().raw_decode(text, position)
        if (behind := follows.match(text, end)) is None:
            raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
        position, name = behind.end(), f"{file}[{number}]"
        number += 1
        read = partial(_record, text[first:end].encode(errors="surrogatepass"), name, key)
        yield name, read, (position, number)
    if text[position + 1 :].strip():
        raise json.JSONDecodeError("Expecting ']' at the end", text, position)


def _rows(file: File, position: int, key: str | None) -> Iterator[Located]:
    parquet = require("pyarrow.parquet", extra="data")
    is_local = isinstance(file, Path)
    source, options = file if is_local else file.open(), {"page_checksum_verification": True}
    with parquet.ParquetFile(source, memory_map=is_local, **options) as table:
        if key is not None:
            check_column(str(file), key, table.schema_arrow.names)
        columns, first = key and [key], 0
        for group in range(table.num_row_groups):
            last = first + table.metadata.row_group(group).num_rows
            if position < last:  # a larger group is read in pieces
                for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    done = max(position - first, 0)
                    for row, cells in enumerate(batch.slice(done).to_pylist(), start=first + done):
                        name, read = f"{file}[{row}]", cells.copy
                        if key is not None:
                            read = partial(check_cell, name, key, cells[key])
                        yield name, read, (row + 1,) * 2
                    first += batch.num_rows
            first = last


def _text_of_file(file: File, key: str) -> str:
    try:
        with opened(file) as stream:
            content = stream.read()
    except Exception as error:
        raise _damage_of(file, error) from None
    if (position := content.find(0)) >= 0:
        raise ValueError(
            f"{file} contains a NUL byte at position {position}: it is binary or UTF-16. Convert "
            "it (iconv -t UTF-8) or leave it out."
        )
    text = _utf8(content, str(file))
    record = {}
    with suppress(ValueError, RecursionError):
        record = json.JSONDecoder().raw_decode(text)[0] if text.startswith("{") else {}
    if isinstance(record.get(key), str):
        raise ValueError(
            f'{file} begins with a JSON record that has "{key}". Rename it to .jsonl, with one '
            "record per line."
        )
    return text


def _record(line: bytes, name: str, key: str | None) -> Any:
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
            f"{name} cannot be read as JSON: {problem}. Write one JSON object per line."
        ) from None
    if key is None:
        return record
    if key == "input_ids" and isinstance(record, dict) and key in record:
        return check_document(name, record if {*TEACHER} & record.keys() else record[key])
    if isinstance(record, dict) and isinstance(record.get(key), str):
        return record[key]
    raise ValueError(
        f'{name} has no string "{key}"; it is {brief(record)}. Pass its key as text_key.'
    )


def _utf8(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}. "
            "Convert it (iconv -t UTF-8) or leave it out."
        ) from None


def _damage_of(file: File, error: Exception) -> ValueError:
    """Name a damaged file; errors of the disk, which have a number, are raised as they are."""
    module = type(error).__module__.partition(".")[0]
    is_of_reader = module in ("_lzma", "json", "pyarrow", "zlib")
    is_damage = is_of_reader or isinstance(error, EOFError | OSError | UnicodeError)
    if not is_damage or getattr(error, "errno", None):
        raise error
    problem = " ".join(str(error).split()).rstrip(".")
    return ValueError(f"{file} cannot be read: {problem}. Write it again.")


def files_at(paths: Paths) -> list[File]:
    """List the files to read, each once, in a fixed order."""
    unique: dict[File, File] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        location = location_of("a path", path)
        is_local = isinstance(location, Path)
        files, entries = _files_in(location) if is_local else _files_behind(location)
        if entries is None:
            raise FileNotFoundError(f"{location} does not exist; name an existing file or folder.")
        if not files:
            raise FileNotFoundError(
                f"{location} has no file to read among {entries} entries. Folders are searched "
                f"for {SUFFIXES}; name other files themselves."
            )
        for file in files:
            if _plain_suffix(file) in REFUSED:
                raise ValueError(f"{file} is not read; write it as JSON lines or parquet.")
            unique.setdefault(file.resolve(), file)
    return list(unique.values())


def _files_in(path: Path) -> tuple[list[Path], int | None]:
    """List a folder's files to read, and count all its entries; None if it does not exist."""
    if path.is_file():
        return [path], 1
    entries = sorted(file.relative_to(path) for file in path.rglob("*"))
    files = [path / file for file in entries if _is_wanted(file) and (path / file).is_file()]
    return files, len(entries) if path.exists() else None


def _files_behind(url: Url) -> tuple[list[RemoteFile], int | None]:
    fs, root = fs_of(url)
    facts = retried(lambda: fs.find(root, detail=True), url)
    files = {PurePosixPath(name).relative_to(root): fact for name, fact in facts.items()}
    is_file = list(files) == [PurePosixPath()]
    wanted = [file for file in sorted(files) if is_file or _is_wanted(file)]
    listed = ((url if is_file else url / file, files[file]) for file in wanted)
    return [RemoteFile(u, fact["size"], _stamp(fact)) for u, fact in listed], len(files) or None


def _stamp(facts: dict[str, Any]) -> str:
    keys = ("ETag", "etag", "LastModified", "mtime", "created")
    return str(next((facts[key] for key in keys if facts.get(key)), ""))


def _is_wanted(relative: PurePath) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    return not hidden and _plain_suffix(relative) in SUFFIXES.split()


def _plain_suffix(file: File | PurePath) -> str:
    """The suffix in lower case, below that of a compressed file."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix
