"""The content of safetensors files: a header, then one tensor after the other.

``save_file`` of the package copies everything into memory once more before it writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
"""Dtypes of safetensors files, by their names there."""


def contents(
    entries: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Yield a file's content in pieces: its header, then the bytes of each tensor.

    Args:
        entries: Dtype and shape of each tensor, by name.
        tensors: Their values, contiguous and in host memory, in the same order.
        metadata: Texts that the header keeps.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [start, end]
        header[name] = {"dtype": DTYPES[dtype], "shape": [*shape], "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the values, which must be aligned
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        yield bytes_of(tensor).numpy().data


def bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor's memory as ``[bytes]`` uint8."""
    return tensor.reshape(-1).view(torch.uint8)
