"""How documents are found in one file: whole files, lines of JSON, rows of parquet.

Finding is cheap and parsing is not, so a reader yields unparsed documents: several readers of one
file each skip the documents of the others. Every error names the file and the line or row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from forgekit.data.documents.protocol import check_column
from forgekit.data.optional_packages import require
from forgekit.inputs import brief, parse_json

ROWS_AT_ONCE = 256
"""Rows of parquet in memory; a larger row group is read in pieces."""

_NEVER = 2**62  # a position behind every row


@attrs.define  # made for each line, and twice as fast as a frozen class
class Raw:
    """A document that was found and not parsed.

    Attributes:
        name: Makes its name.
        load: Parses its text, or raises ValueError.
        position: The position after it in the file, in bytes or rows.
        number: The number of lines or rows up to there.
        bytes: The number of bytes up to there, for progress.
    """

    name: Callable[[], str]
    load: Callable[[], str]
    position: int
    number: int
    bytes: int


Reader: TypeAlias = Callable[[Path, int, int, str], Iterator[Raw]]
"""Reads a file from a position and line number; the last argument is the key of the text."""


def reader_of(file: Path) -> Reader:
    """Choose a reader by the suffix, in any case."""
    return {".jsonl": _lines, ".parquet": _rows}.get(file.suffix.lower(), _whole)


def _whole(file: Path, position: int, number: int, key: str) -> Iterator[Raw]:  # noqa: ARG001
    if not position and (size := file.stat().st_size):  # /proc/kmsg has none, and never ends
        yield Raw(partial(str, file), partial(_decode, file), 1, 1, size)


def _decode(file: Path) -> str:
    content = file.read_bytes()
    if (position := content.find(0)) >= 0:
        raise ValueError(
            f"{file} holds a NUL byte at position {position}: it is binary, or text in UTF-16. "
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


def _lines(file: Path, position: int, number: int, key: str) -> Iterator[Raw]:
    for line, name, after, count in _raw_lines(file, position, number):
        yield Raw(name, partial(_parse, line, name, key), after, count, after)


def _raw_lines(
    file: Path, position: int = 0, number: int = 0
) -> Iterator[tuple[bytes, Callable[[], str], int, int]]:
    """Yield each line that is not blank, its name, and the position and number after it."""
    if not file.stat().st_size:
        return
    with file.open("rb", buffering=2**20) as lines:
        lines.seek(position)
        for line in lines:
            position += len(line)
            number += 1
            if not line.isspace():
                yield line, partial("{}:{}".format, file, number), position, number


def json_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the object of each line of a ``.jsonl`` file.

    Raises:
        ValueError: If a line is not UTF-8, or not one JSON object.
    """
    for line, name, *_ in _raw_lines(file):
        record = _parse_line(line, name)
        if not isinstance(record, dict):
            raise ValueError(f"{name()} is {brief(record)}; each line must be one JSON object.")
        yield name(), record


def _parse(line: bytes, name: Callable[[], str], key: str) -> str:
    record = _parse_line(line, name)
    if isinstance(record, dict) and isinstance(record.get(key), str):
        return record[key]
    quoted = json.dumps(key, ensure_ascii=False)
    raise ValueError(
        f"{name()} has no string {quoted}; it is {brief(record)}. "
        f'Each line must look like {{{quoted}: "..."}}.'
    )


def _parse_line(line: bytes, name: Callable[[], str]) -> Any:
    text = _utf8(line.rstrip(), name)
    try:
        record = parse_json(text)
        if "\\u" in text:  # half a surrogate pair is valid JSON but no text
            json.dumps(record, ensure_ascii=False).encode()
    except ValueError as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):  # its own text would say "line 1"
            what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ValueError(
            f"{name()} cannot be read as JSON: {what}. "
            "Each line must be one JSON object; mend the line or remove it."
        ) from None
    return record


def _rows(file: Path, position: int, number: int, key: str) -> Iterator[Raw]:
    parquet = require("pyarrow.parquet", extra="hf")
    size = file.stat().st_size
    try:
        with parquet.ParquetFile(file, memory_map=True, page_checksum_verification=True) as opened:
            _check_strings(opened.schema_arrow, file, key)
            rows = opened.metadata.num_rows
            for number, value in _values(opened, position, key):
                name = partial("{}[{}]".format, file, number)
                after, done = number + 1, size * (number + 1) // rows
                yield Raw(name, partial(_text_in, value, name, key), after, after, done)
    except (require("pyarrow", extra="hf").ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise  # the disk's error, not the file's
        what = " ".join(str(error).split()).rstrip(".")
        load = partial(_refuse, f"{file} cannot be read as parquet: {what}. Write it again.")
        yield Raw(partial(str, file), load, _NEVER, number, size)


def _values(opened: Any, position: int, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each row from ``position`` on."""
    first = 0
    for group in range(opened.num_row_groups):
        last = first + opened.metadata.row_group(group).num_rows
        if position < last:
            for batch in opened.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[key]):
                for row in range(max(0, position - first), batch.num_rows):
                    yield first + row, batch.column(0)[row]
                first += batch.num_rows
        first = last


def _check_strings(schema: Any, file: Path, key: str) -> None:
    check_column(str(file), key, schema.names)
    kind = schema.field(key).type
    if str(getattr(kind, "value_type", kind)) not in ("string", "large_string", "string_view"):
        raise ValueError(
            f'{file} has {kind} in column "{key}"; it must be strings. Name another with text_key.'
        )


def _text_in(value: Any, name: Callable[[], str], key: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name()} is not UTF-8: {error}. Mend the row or remove it.") from None
    if text is None:
        raise ValueError(f'{name()} has null in column "{key}". Fill the row or remove it.')
    return text


def _refuse(message: str) -> str:
    raise ValueError(message)
