"""How the documents in one file are found: whole files, lines of JSON, rows of parquet.

Finding is cheap and parsing is not, so a reader yields documents unparsed: several readers of one
file each pass over the documents of the others. Every error names the file and the line or row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from forgekit.data.optional_packages import require
from forgekit.inputs import SHOWN, parse_json

__all__ = ["Raw", "Reader", "reader_of"]

ROWS_AT_ONCE = 256
"""Rows of parquet in memory; a row group is read in pieces, whatever its size."""

_NEVER = 2**62
_JSON = json.JSONDecoder()  # faster than the one that looks for a key that stands twice


@attrs.define  # made for each line, and twice as fast as a frozen one
class Raw:
    """A document that was found and not parsed.

    Attributes:
        name: Makes its name.
        load: Parses its text, or raises ValueError.
        place: How far the file was read with it, in bytes or rows; where to go on.
        number: How many lines or rows that is.
        bytes: How many bytes that is, for progress.
    """

    name: Callable[[], str]
    load: Callable[[], str]
    place: int
    number: int
    bytes: int


Reader: TypeAlias = Callable[[Path, int, int, str], Iterator[Raw]]
"""Reads a file from a place and line number on, taking texts from under a key."""


def reader_of(file: Path) -> Reader:
    """Choose by the ending, whatever its case."""
    return {".jsonl": _lines, ".parquet": _rows}.get(file.suffix.lower(), _whole)


def _whole(file: Path, place: int, number: int, key: str) -> Iterator[Raw]:  # noqa: ARG001
    if not place:
        load = partial(_decode, file)
        yield Raw(partial(str, file), load, place=1, number=1, bytes=file.stat().st_size)


def _decode(file: Path) -> str:
    content = file.read_bytes()
    if (place := content.find(0)) >= 0:
        raise ValueError(
            f"{file} holds a NUL byte at position {place}: it is binary, or text in UTF-16. "
            "Convert it (iconv -t UTF-8) or leave it out."
        )
    return _utf8(content, partial(str, file))


def _utf8(content: bytes, name: Callable[[], str]) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name()} is not UTF-8: byte 0x{content[error.start]:02x} at position {error.start}. "
            "Convert it (iconv -t UTF-8) or leave it out."
        ) from None


def _lines(file: Path, place: int, number: int, key: str) -> Iterator[Raw]:
    with file.open("rb", buffering=2**20) as lines:
        lines.seek(place)
        for line in lines:
            place += len(line)
            number += 1
            if not line.isspace():
                name = partial("{}:{}".format, file, number)
                yield Raw(name, partial(_parse, line, name, key), place, number, bytes=place)


def _parse(line: bytes, name: Callable[[], str], key: str) -> str:
    text = _utf8(line.rstrip(), name)
    try:
        record = _record(text, key)
        if isinstance(record, dict) and isinstance(record.get(key), str):
            record[key].encode()  # half of a surrogate pair is JSON and no text
            return record[key]
    except ValueError as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):  # which would name line 1 as well
            what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(
            f"{name()} cannot be read as JSON: {what}. "
            "Each line must be one JSON object; mend the line or remove it."
        ) from None
    keys = ", ".join(_names(record)) if isinstance(record, dict) else ""
    raise ValueError(
        f"{name()} has no string {_quoted(key)}; it is a {type(record).__name__} with "
        f'{keys or "no keys"}. Each line must look like {{{_quoted(key)}: "..."}}.'
    )


def _record(text: str, key: str) -> Any:
    try:
        if text.count(_quoted(key)) < 2:
            return _JSON.decode(text)
    except (ValueError, RecursionError):
        pass  # so that the careful one says what is wrong
    return parse_json(text)


def _names(record: dict[str, Any]) -> list[str]:
    """Name the first ten keys of an object."""
    names = [_quoted(name if len(name) < SHOWN else f"{name[:SHOWN]}...") for name in record]
    return [*names[:10], f"{len(names) - 10} more"] if len(names) > 10 else names


def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _rows(file: Path, place: int, number: int, key: str) -> Iterator[Raw]:
    parquet = require("pyarrow.parquet", extra="hf")
    size = file.stat().st_size
    try:
        with parquet.ParquetFile(file, memory_map=True, page_checksum_verification=True) as opened:
            _check_column(opened.schema_arrow, file, key)
            rows = opened.metadata.num_rows
            for number, column, row in _values(opened, place, key):
                name = partial("{}[{}]".format, file, number)
                load = partial(_text_in, column, row, name, key)
                done = size * (number + 1) // rows
                yield Raw(name, load, place=number + 1, number=number + 1, bytes=done)
    except (require("pyarrow", extra="hf").ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise  # of the disk, not of what is in the file
        what = " ".join(str(error).split()).rstrip(".")
        load = partial(_refuse, f"{file} cannot be read as parquet: {what}. Write it again.")
        yield Raw(partial(str, file), load, place=_NEVER, number=number, bytes=size)


def _values(opened: Any, place: int, key: str) -> Iterator[tuple[int, Any, int]]:
    """Yield number, column and row within the column, from row ``place`` on."""
    first = 0
    for group in range(opened.num_row_groups):
        last = first + opened.metadata.row_group(group).num_rows
        if place < last:
            batches = opened.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[key])
            for batch in batches:
                for row in range(max(0, place - first), batch.num_rows):
                    yield first + row, batch.column(0), row
                first += batch.num_rows
        first = last


def _check_column(schema: Any, file: Path, key: str) -> None:
    if key not in schema.names:
        names = ", ".join(f'"{name}"' for name in schema.names)
        raise ValueError(f'{file} has no column "{key}"; it has {names}. Name one with text_key.')
    kind = schema.field(key).type
    if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
        raise ValueError(
            f'{file} has {kind} in column "{key}"; it must be strings. Name another with text_key.'
        )


def _text_in(column: Any, row: int, name: Callable[[], str], key: str) -> str:
    try:
        text = column[row].as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name()} is not UTF-8: {error}. Mend the row or remove it.") from None
    if text is None:
        raise ValueError(f'{name()} has null in column "{key}". Fill the row or remove it.')
    return text


def _refuse(message: str) -> str:
    raise ValueError(message)
