"""Files that somebody has changed on purpose: loading runs nothing of what they say."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
import warnings
import zlib
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from manifests import rewrite
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forgekit.ranks import CheckpointError
from forgekit.run.checkpoints.load import checkpoint_load
from forgekit.run.checkpoints.save import checkpoint_save
from forgekit.run.checkpoints.storage import latest_checkpoint
from forgekit.state import TrainState

KEY = MetadataIndex("model.weight", torch.Size([0, 0]))


class Bomb:
    """Whoever unpickles it makes a directory."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def build(seed=0, world=1):
    torch.manual_seed(seed)
    model, mesh = torch.nn.Linear(3, 2), None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)


@pytest.fixture
def path(tmp_path):
    """A good checkpoint."""
    checkpoint_save(build(), tmp_path / "runs", blocking=True)
    return latest_checkpoint(tmp_path / "runs")


def replace(path, name, content):
    """Change a file and the manifest with it, as somebody does who knows the format."""
    (path / name).write_bytes(content)
    entry = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewrite(path, lambda manifest: manifest["files"].update({name: entry}))


def index_of(path):
    return pickle.loads((path / ".metadata").read_bytes())


def divert(path, index, content):
    """Let the index say that one tensor is ``content``, which the shard then holds."""
    shard = (path / "__0_0.distcp").read_bytes()
    index.storage_data[KEY].offset, index.storage_data[KEY].length = len(shard), len(content)
    replace(path, "__0_0.distcp", shard + content)
    replace(path, ".metadata", pickle.dumps(index))


def torch_saved(thing):
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()


def load_with_torch(path):
    """What torch does of itself, to show that the file is dangerous."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = {"model.weight": torch.empty(2, 3)}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def refused(directory, message):
    """Load into a fresh state, which must stay as it is."""
    state = build(seed=1)
    before = state.model.weight.clone()
    with pytest.raises(CheckpointError, match=message) as refusal:
        checkpoint_load(state, directory)
    assert state.model.weight.equal(before)
    assert state.step == 0
    return str(refusal.value)


def _bare(path, bomb):
    replace(path, ".metadata", pickle.dumps(bomb))


def _inside(path, bomb):
    index = index_of(path)
    index.planner_data = bomb
    replace(path, ".metadata", pickle.dumps(index))


def _as_bytes(path, bomb):
    """Make a tensor one of the entries that torch unpickles without any check."""
    index = index_of(path)
    index.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    index.storage_data[MetadataIndex("model.weight")] = index.storage_data[KEY]
    divert(path, index, torch_saved(bomb))


BOMBS = {
    "instead of the index": (_bare, r"asks for posix\.mkdir"),
    "inside the index": (_inside, r"asks for posix\.mkdir"),
    "as an entry of bytes": (_as_bytes, r"asks for \S+\.BytesStorageMetadata"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_an_index_with_code_is_refused_and_the_code_not_run(path, tmp_path, case):
    hide, reason = BOMBS[case]
    hide(path, Bomb(tmp_path / "ran"))
    message = refused(path.parent, rf"not the index of a checkpoint of tensors: it {reason}\. Noth")
    assert str(path / ".metadata") in message
    assert "delete this checkpoint and load one that you trust" in message
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(BaseException):  # torch's CheckpointException derives from it
        load_with_torch(path)
    assert (tmp_path / "ran").exists()


class Attribute:
    """Whoever unpickles it reads an attribute."""

    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return getattr, self.what


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            (Metadata, "__init__"),
            r"asks for the attribute __init__ of <class '\S+\.Metadata'>",
        ),
        ((_MEM_FORMAT_ENCODING, "mro"), r"asks for the attribute mro of <enum '_MEM_FORMAT_ENC"),
    ],
)
def test_an_index_reads_no_attributes_but_memory_formats(path, what, message):
    index = index_of(path)
    index.planner_data = Attribute(*what)
    replace(path, ".metadata", pickle.dumps(index))
    refused(path.parent, message)


def test_an_index_of_python_3_11_0_to_3_11_3_is_read(tmp_path, monkeypatch):
    """There enums are pickled as attributes of their classes."""
    with monkeypatch.context() as patch:
        patch.setattr(
            enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
        )
        checkpoint_save(before := build(seed=3), tmp_path, blocking=True)
    assert b"getattr" in (latest_checkpoint(tmp_path) / ".metadata").read_bytes()
    after = checkpoint_load(build(), tmp_path)
    assert after.model.weight.equal(before.model.weight)


@pytest.mark.parametrize("dump", [torch_saved, partial(pickle.dumps, protocol=2)])
def test_a_shard_with_code_is_refused_and_the_code_not_run(path, tmp_path, dump):
    content = dump(Bomb(tmp_path / "ran"))
    divert(path, index_of(path), content)
    with pytest.raises(CheckpointError, match=r"shard that is not a tensor .* nothing of it was r"):
        checkpoint_load(build(), path.parent)
    assert not (tmp_path / "ran").exists()
    with contextlib.suppress(RuntimeError):
        torch.load(io.BytesIO(content), weights_only=False)
    assert (tmp_path / "ran").exists()


def _other_file(index):
    index.storage_data[KEY].relative_path = "../secret"


def _transformed(index):
    index.storage_data[KEY].transform_descriptors = ["zstd"]


def _no_tensor(index):
    index.state_dict_metadata["model.weight"] = {"size": 3}


CHANGES = {
    "another file": (_other_file, r"refers to '\.\./secret', which the manifest does not list"),
    "a transform": (_transformed, r"asks for \['zstd'\]"),
    "no tensor": (_no_tensor, r"'model\.weight' is not a tensor"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_index_may_say_only_what_a_save_says(path, case):
    change, message = CHANGES[case]
    index = index_of(path)
    change(index)
    replace(path, ".metadata", pickle.dumps(index))
    refused(path.parent, message)


# Opcodes: the class Metadata, then (None, {"evil": 1}) as its state, which sets attributes.
SET_ATTRIBUTE = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x04\x00\x00\x00%sK\x01stb."
)
CONTENTS = {
    "empty": (b"", "Ran out of input"),
    "garbage": (b"garbage", "not the index"),
    "another thing": (pickle.dumps({"a": 1}), "it holds a dict"),
    "sets an attribute": (SET_ATTRIBUTE % b"evil", "it changes Metadata"),
    "sets another": (SET_ATTRIBUTE.replace(b"\x04\x00", b"\x07\x00") % b"version", "it changes M"),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_what_is_no_index_is_refused(path, case):
    content, message = CONTENTS[case]
    before = dict(vars(Metadata))
    replace(path, ".metadata", content)
    refused(path.parent, message)
    assert dict(vars(Metadata)) == before


def test_an_index_that_torch_wrote_is_read_as_torch_reads_it(path):
    from forgekit.run.checkpoints.tensor_shards import read_index

    with (path / ".metadata").open("rb") as stream:
        found = read_index(stream, "it", {"__0_0.distcp"})
    expected = index_of(path)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert all(isinstance(e, TensorStorageMetadata) for e in found.state_dict_metadata.values())


def _refuse(rank, world, directory, message):
    state = build(1, world)
    before = state.model.weight.full_tensor()
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(state, directory)
    return state.model.weight.full_tensor().equal(before)


def test_two_ranks_refuse_an_index_with_code(path, tmp_path):
    _inside(path, Bomb(tmp_path / "ran"))
    assert run_ranks(_refuse, 2, path.parent, "rank 0: .* not the index") == [True, True]
    assert not (tmp_path / "ran").exists()


def _refuse_shard(rank, world, directory):
    with pytest.raises(CheckpointError, match=r"shard that is not a tensor \(read by rank \d\)"):
        checkpoint_load(build(1, world), directory)


def test_two_ranks_refuse_a_shard_with_code(path, tmp_path):
    divert(path, index_of(path), torch_saved(Bomb(tmp_path / "ran")))
    run_ranks(_refuse_shard, 2, path.parent)
    assert not (tmp_path / "ran").exists()
