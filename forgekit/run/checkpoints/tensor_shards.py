"""torch's writer and reader of shards: one that says what went wrong, one that runs nothing.

torch keeps the index of a checkpoint in ``.metadata``, a pickle, and a pickle can name any function
to call. Checksums do not help against somebody who writes both. The index is therefore unpickled
with a short list of names, and the shards with ``weights_only``. The list leaves out
``BytesStorageMetadata``: torch unpickles an entry of that kind without any check, and a
``TrainState`` has tensors only.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from forgekit.ranks import CheckpointError

_RECORDS: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        (kind.__module__, kind.__name__): kind
        for kind in (
            *(ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
            *(TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size),
        )
    }
)


class ShardWriter(dcp.FileSystemWriter):
    """torch's writer, with the system's own error where a disk is full or broken."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard.

        Raises:
            OSError: If the system did. torch chains it to one about offsets in an archive, and the
                chain is lost when the error is pickled for the other ranks.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, cause.filename or str(self.path)) from error


class IndexReader(dcp.FileSystemReader):
    """torch's reader with an index that was read before, and files from any storage."""

    def __init__(self, path: str | Path, index: Metadata, fs: FileSystem | None = None) -> None:
        super().__init__(path)
        self.fs = fs or self.fs
        self._index = index

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the index; torch would unpickle the file here."""
        return self._index


class Downloads(FileSystem):
    """What torch opens remote files with: each that a rank needs is fetched whole, once."""

    def __init__(self, opened: Callable[[str], AbstractContextManager[BinaryIO]]) -> None:
        self._opened = opened

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Yield a local copy of a file; torch seeks in it, tensor by tensor."""
        with tempfile.TemporaryFile(mode.replace("r", "w+")) as local:
            with self._opened(str(path)) as stream:
                shutil.copyfileobj(stream, local, 4 << 20)
            local.seek(0)
            yield cast(io.IOBase, local)


def read_index(stream: BinaryIO, name: str, files: Collection[str]) -> Metadata:
    """Unpickle a checkpoint's index as far as it consists of numbers, names and shapes.

    Args:
        stream: The file.
        name: What it is called in messages.
        files: The files that the manifest lists; the index may refer to no others.

    Returns:
        The index as torch's readers take it.

    Raises:
        CheckpointError: If it holds anything else; nothing of it has been run then.
    """
    try:
        index = _IndexUnpickler(stream).load_unchanged()
        _check(index, files)
    except Exception as error:  # broken pickles raise nearly anything
        raise CheckpointError(
            f"{name} is not the index of a checkpoint of tensors: {error}. Nothing of it was run. "
            "Somebody may have changed it: delete this checkpoint and load one that you trust."
        ) from None
    index.storage_meta = StorageMeta()
    return index


class _IndexUnpickler(pickle.Unpickler):
    """An unpickler that makes the records of an index and calls no functions of the pickle's."""

    # Pickles of newer Python versions name pathlib's private modules, hence the partition.
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module.partition(".")[0] == "pathlib":
            return _path
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def load_unchanged(self) -> Any:
        """Unpickle, and undo what pickles can do even so: set attributes of a class they name."""
        before = {kind: dict(vars(kind)) for kind in _RECORDS.values()}
        try:
            return self.load()
        finally:
            for kind, attributes in before.items():
                if dict(vars(kind)) != attributes:
                    _restore(kind, attributes)
                    raise pickle.UnpicklingError(f"it changes {kind.__qualname__}")


def _restore(kind: type, attributes: dict[str, Any]) -> None:
    for name in vars(kind).keys() - attributes.keys():
        delattr(kind, name)
    for name, value in attributes.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"it has a tensor of layout {name}")
    return torch.strided


def _memory_format(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Read a member of an enum, which Python 3.11.0 to 3.11.3 pickle as an attribute of it."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"it asks for the attribute {name} of {kind!r}")
    return _MEM_FORMAT_ENCODING[name]


def _path(*parts: str) -> str:
    return str(Path(*parts))


def _check(index: Any, files: Collection[str]) -> None:
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{key!r} is not a tensor")
    for where in (index.storage_data or {}).values():
        if where.relative_path not in files:
            raise pickle.UnpicklingError(
                f"it refers to {where.relative_path!r}, which the manifest does not list"
            )
        if where.transform_descriptors:
            raise pickle.UnpicklingError(f"it asks for {where.transform_descriptors!r}")
