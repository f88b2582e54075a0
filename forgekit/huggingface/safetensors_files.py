"""Directories of safetensors files: locations of tensors, reading of boxes, writing of files.

A file is mapped into memory and a rank copies the boxes that it holds, so that of the rest nothing
is read. One is written tensor by tensor: ``save_file`` would hold all of its tensors at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forgekit.checks import brief, differences, parse_json
from forgekit.files import open_regular, read_regular
from forgekit.ranks import CheckpointError, explain
from forgekit.safetensors_files import bytes_of, contents
from forgekit.tensors import Box

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS_KEY = "transformers_weights"
"""Key of config.json that names another weight file or index."""


@attrs.frozen
class Stored:
    """A tensor on disk.

    Attributes:
        file: Its file.
        dtype: Of its values.
        shape: Its shape.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """List a directory's weight files, those that transformers reads.

    That is ``model.safetensors`` if there is one, whatever lies beside it: an index there is left
    from an earlier save. Only without it the index counts; a ``config.json`` may name either.

    Returns:
        The files, and by tensor the file that an index lists; None without one.

    Raises:
        CheckpointError: If there are no weights.
        KeyError: If the index lists none.
    """
    config = directory / "config.json"
    named = read_json(config).get(WEIGHTS_KEY) if config.is_file() else None
    names = [SINGLE, INDEX] if named is None else [str(named)]
    name = next((name for name in names if (directory / name).exists()), None)
    if name is None:
        raise CheckpointError(
            f"{directory} has neither {' nor '.join(names)}; it has "
            f"{brief(sorted(path.name for path in directory.iterdir()))}."
        )
    if not name.endswith(".index.json"):
        return [directory / name], None
    listed = read_json(directory / name)["weight_map"]
    return [directory / file for file in dict.fromkeys(listed.values())], listed


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Read the headers of a directory's files.

    Returns:
        Every tensor by name.

    Raises:
        CheckpointError: If a file is missing, damaged or cut short, or the index lists other
            tensors than there are.
    """
    paths, listed = weight_files(directory)
    stored: dict[str, Stored] = {}
    for path in paths:
        try:
            with reading(path) as file:
                for key in file.keys():  # noqa: SIM118
                    view = file.get_slice(key)[...]
                    stored[key] = Stored(path, view.dtype, tuple(view.shape))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is missing, damaged or incomplete: {explain(error)}. Fetch it again."
            ) from None
    files = {name: str(one.file.relative_to(directory)) for name, one in stored.items()}
    if listed is not None and (different := differences(files, listed)):
        raise CheckpointError(f"the index in {directory} does not fit its files: {different}.")
    return stored


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file.

    Raises:
        CheckpointError: If it is not there, or holds something else.
    """
    try:
        tree = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {explain(error)}.") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} contains {brief(tree)}; it must be a JSON object.")
    return tree


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write an object as a JSON file that people can read."""
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Open a file for reading boxes."""
    with open_regular(path), safe_open(path, "pt") as file:
        yield file


def view_of(file: Any, name: str, box: Box) -> Tensor:
    """Return a box of a tensor in an open file; values are read on use."""
    return file.get_slice(name)[slices(box) or ...]


def slices(box: Box) -> tuple[slice, ...]:
    """Convert a box to an index."""
    return tuple(slice(*bounds) for bounds in box)


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
    with path.open("xb") as file:
        for content in contents(entries, tensors, {"format": "pt"}):
            file.write(content)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, NaN and signed zeros included."""
    is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return is_alike and torch.equal(bytes_of(one), bytes_of(other))
