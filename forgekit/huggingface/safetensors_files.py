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
from safetensors import SafetensorError, safe_open
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
    index, listed = directory / INDEX, None
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            raise CheckpointError(f"{index} has no weight_map of names to files.")
    elif not (directory / SINGLE).exists():
        names = sorted(path.name for path in directory.iterdir())
        raise CheckpointError(
            f"{directory} has neither {SINGLE} nor {INDEX}; it has {brief(names)}. Save the model "
            "with save_pretrained(..., safe_serialization=True)."
        )
    stored: dict[str, Stored] = {}
    for file in dict.fromkeys([SINGLE] if listed is None else listed.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{index} names a file outside of its directory: {brief(file)}.")
        header = _read_header(directory / file)
        if twice := sorted(stored.keys() & header.keys()):
            raise CheckpointError(
                f"{twice[0]!r} stands in {stored[twice[0]].file.name} and in {file}."
            )
        stored |= header
    files = {name: one.file.name for name, one in stored.items()}
    if listed is not None and files != listed:
        name = next(name for name in {**listed, **files} if listed.get(name) != files.get(name))
        raise CheckpointError(
            f"{index} says that {name!r} is in {listed.get(name, 'no file')}, and it is in "
            f"{files.get(name, 'no file')}. Index and files are not of one save; fetch them again."
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
    """Where each tensor of a file lies; the package checks header, sizes and the file's length."""
    try:
        with open_regular(path) as file:
            with safe_open(path, "pt"):
                pass
            length = int.from_bytes(file.read(8), "little")
            entries = parse_json(file.read(length))
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} is missing, damaged or was not written to the end: {why}. Fetch it again."
        ) from None
    entries.pop("__metadata__", None)
    if odd := [(n, one["dtype"]) for n, one in entries.items() if one["dtype"] not in DTYPES]:
        raise CheckpointError(f"{path}: {odd[0][0]!r} is of dtype {odd[0][1]}, which is not read.")
    start = 8 + length
    return {
        name: Stored(
            path, DTYPES[one["dtype"]], tuple(one["shape"]), start + one["data_offsets"][0]
        )
        for name, one in entries.items()
    }


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
