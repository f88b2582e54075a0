"""Files of the safetensors format: their headers, boxes of their tensors, and how to write one.

The ``safetensors`` package maps whole files into memory, or takes all tensors of a file at once.
Here a box is read straight into the memory of the tensor that it belongs to, or through a small
buffer, and a file is written tensor by tensor, so that neither holds more than that.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import attrs
import torch
from torch import Tensor

from forgekit.files import open_regular
from forgekit.huggingface.names import Box
from forgekit.inputs import brief, parse_json
from forgekit.ranks import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)

LARGEST_HEADER = 100_000_000
"""Bytes; the package refuses more as well."""

BUFFER = 16 << 20
"""Bytes that are read at once where they cannot go straight to where they belong."""


@attrs.frozen
class Stored:
    """A tensor on disk.

    Attributes:
        file: Its file.
        dtype: Of its values.
        shape: Its shape.
        start: Its first byte in the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Read the headers of a directory's files.

    Returns:
        Every tensor by name.

    Raises:
        CheckpointError: If a file is missing, damaged or cut short, a tensor stands in two files,
            or the index lists others than there are.
    """
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            found = sorted(path.name for path in directory.iterdir())
            raise CheckpointError(
                f"{directory} has neither {SINGLE} nor {INDEX}; it has {brief(found)}. Save the "
                "model with save_pretrained(..., safe_serialization=True)."
            )
        return _read_header(directory / SINGLE)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise CheckpointError(f"{index} has no weight_map of names to files.")
    if odd := [f for f in listed.values() if Path(f).name != f]:
        raise CheckpointError(f"{index} names a file outside of its directory: {brief(odd[0])}.")
    stored: dict[str, Stored] = {}
    for file in dict.fromkeys(listed.values()):
        header = _read_header(directory / file)
        if twice := stored.keys() & header.keys():
            first = sorted(twice)[0]
            raise CheckpointError(f"{first!r} stands in {stored[first].file.name} and in {file}.")
        stored |= header
    wrong = [n for n, file in listed.items() if n not in stored or stored[n].file.name != file]
    if wrong or (wrong := [name for name in stored if name not in listed]):
        where = stored[wrong[0]].file.name if wrong[0] in stored else "no file"
        raise CheckpointError(
            f"{index} says that {wrong[0]!r} is in {listed.get(wrong[0], 'no file')}, and it is in "
            f"{where}. Index and files are not of one save; fetch them again."
        )
    return stored


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        CheckpointError: If it is not there, or holds something else.
    """
    try:
        with open_regular(path) as file:
            found = parse_json(file.read())
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise CheckpointError(f"{path} cannot be read: {why}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {brief(found)}; it must be an object.")
    return found


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write an object as a JSON file that people can read."""
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"it has {size:,} bytes, fewer than its header")
            entries = parse_json(file.read(length))
        stored = dict(_entries(path, entries, 8 + length, size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged or was not written to the end: {error}. Fetch it again."
        ) from None
    return stored


def _entries(path: Path, entries: Any, data: int, size: int) -> Iterator[tuple[str, Stored]]:
    """Each entry of a header; together they are all bytes of the file."""
    end = 0
    entries = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1]["data_offsets"]):
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} is of dtype {entry['dtype']}, which is not read here")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if any(not isinstance(one, int) or one < 0 for one in shape):
            raise ValueError(f"{name!r} has the shape {shape}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} of shape {shape} is said to be the bytes {start} to {stop}")
        end = stop
        yield name, Stored(path, dtype, shape, data + start)
    if data + end != size:
        raise ValueError(f"it has {size:,} bytes and its header describes {data + end:,}")


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read boxes from."""
    with open_regular(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield file


@torch.no_grad()
def fill(target: Tensor, file: BinaryIO, stored: Stored, box: Box) -> None:
    """Read a box of a tensor into a tensor, in place, and cast it to its dtype.

    Args:
        target: Of the box's shape; any device, strides and dtype.
        file: What ``reading`` yielded.
        stored: The tensor.
        box: Which part of it.

    Raises:
        CheckpointError: If the file ends before.
    """
    if not stored.shape:
        target, box, shape = target.reshape(1), ((0, 1),), (1,)
    else:
        shape = stored.shape
    inner = tuple(slice(*bounds) for bounds in box[1:])
    row = math.prod(shape[1:]) * stored.dtype.itemsize
    is_whole = all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True))
    is_plain = target.device.type == "cpu" and target.is_contiguous()
    first, last = box[0]
    if is_whole and is_plain and target.dtype == stored.dtype:
        _read_into(target, file, stored, stored.start + first * row)
        return
    step = max(1, BUFFER // max(row, 1))
    for start in range(first, last, step):
        stop = min(start + step, last)
        buffer = torch.empty((stop - start, *shape[1:]), dtype=stored.dtype)
        _read_into(buffer, file, stored, stored.start + start * row)
        target[start - first : stop - first].copy_(buffer[(slice(None), *inner)])


def _read_into(target: Tensor, file: BinaryIO, stored: Stored, offset: int) -> None:
    left = _bytes_of(target)
    while left:
        count = os.preadv(file.fileno(), [left], offset)
        if not count:
            raise CheckpointError(f"{stored.file} became shorter while it was read.")
        left, offset = left[count:], offset + count


def write_tensors(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
) -> None:
    """Write a file, one tensor after the other.

    Args:
        path: The new file.
        entries: Dtype and shape of each, by name.
        tensors: Their values, in host memory, in the same order.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(_bytes_of(tensor.contiguous()))


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)
