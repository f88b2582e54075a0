"""What happens to checkpoints in the world: damage, and disks that are full or fail."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
from covering import first_of
from lab import file_size_limit
from pool import run_again
from saved import assert_same, build, edit, everything, flip, rewrite, truncate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forgekit as fk


def _save(rank, world, directory, *steps, **options):
    for step in steps:
        state = build(world, step, step=step)
        path = fk.checkpoint_save(state, directory, blocking=True, **options).wait()
    return path


def _load(rank, world, directory, step=None):
    """Load; return the error, or the step if the weights are those of that step."""
    state = build(world, 9)
    before = everything(state)
    try:
        state = fk.checkpoint_load(state, directory, step=step)
    except fk.CheckpointError as error:
        assert_same(everything(state), before)
        return str(error)
    assert_same(everything(state), everything(build(world, state.step, step=state.step)))
    return state.step


save, load = partial(_save, 0, 1), partial(_load, 0, 1)


def in_shard(change):
    return lambda folder: change(next(folder.rglob("rank_00000.safetensors")))


def manifest_of(content):
    return lambda folder: (folder / "manifest.json").write_bytes(content)


def in_manifest(how, **changes):
    return lambda folder: how(folder, lambda manifest: manifest.update(changes))


DAMAGE = {
    "truncated": (in_shard(truncate), r"rank_00000\.safetensors is .*'bytes': .* saved as"),
    "flipped bit": (in_shard(flip), r"rank_00000\.safetensors is .*'crc32': .* saved as"),
    "missing": (in_shard(Path.unlink), r"rank_00000\.safetensors is missing"),
    "edited": (in_manifest(edit, world=7), "was changed after it was saved"),
    "no text": (manifest_of(b"\xff\x00"), "is not JSON"),
    "a list": (manifest_of(b"[]"), "does not describe a checkpoint"),
    "renamed": (in_manifest(rewrite, step=1), "says step 1, so the directory was renamed"),
}


SOME = [*((name, "{}") for name in DAMAGE), ("truncated", "file://{}")]


@pytest.mark.parametrize(("name", "where"), first_of(SOME, product(DAMAGE, ["{}", "file://{}"])))
def test_what_is_damaged_is_passed_over_and_refused_where_asked_for(tmp_path, caplog, name, where):
    url, (damage, message) = where.format(tmp_path), DAMAGE[name]
    save(url, 2)
    damage(tmp_path / "step_00000002")
    assert re.search(message, load(url, 2))
    assert re.search(rf"no whole checkpoint to load: .*{message}", load(url))
    save(url, 1)
    caplog.clear()
    assert load(url) == 1
    assert re.search(rf"step_00000002.*{message}", caplog.text)


def _look(rank, world, directory):
    return _load(rank, world, directory, 2), _load(rank, world, directory)


def test_two_ranks_agree_on_damage(tmp_path):
    """One rank reads the file; both pass over the checkpoint, or refuse the one asked for."""
    run_again(_save, 2, tmp_path, 1, 2)
    (tmp_path / "step_00000002" / "rank_00001.safetensors").unlink()
    ((refusal, loaded),) = {*run_again(_look, 2, tmp_path)}
    assert ("step_00000002/rank_00001.safetensors is missing" in refusal, loaded) == (True, 1)
    DAMAGE["truncated"][0](tmp_path / "step_00000001")
    for _, refusal in run_again(_look, 2, tmp_path):
        assert re.search(r"no whole checkpoint to load: .*0001/rank_00000", refusal)


@pytest.mark.parametrize("where", ["{}", "file://{}"])
def test_without_a_checkpoint_the_state_itself_comes_back(tmp_path, caplog, where):
    state, url = build(), where.format(tmp_path)
    half = tmp_path / "step_00000009"
    for make in (Path, half.mkdir, (tmp_path / ".step_00000010.0123456789ab.new").mkdir):
        make()
        assert fk.latest_checkpoint(url) is None
        assert fk.checkpoint_load(state, url + "/") is state
    assert state.step == 0
    assert "step_00000009 does not count: its manifest.json is missing" in caplog.text
    (half / "model.pt").write_bytes(b"of an unknown format")
    assert re.search("step_00000009 may be one, but its manifest.json is missing", load(url))
    (half / "model.pt").rename(half / "manifest.json")
    assert "is a checkpoint itself; pass the folder above it" in load(half)


def test_a_link_to_a_disk_that_is_not_there_is_no_run_without_checkpoints(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    assert "No such file or directory" in load(tmp_path / "checkpoints")
    (tmp_path / "step_00000003").symlink_to(tmp_path / "disk")
    assert "No such file or directory" in load(tmp_path)


def pipes(folder):
    for path in [*folder.iterdir()]:
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(folder.with_name("step_00000003"))


NOT_PASSED_OVER = {
    "of another format": (in_manifest(rewrite, format=99), "2 has format 99, but .* format 3"),
    "pipes, which would hang": (pipes, "Not a regular file"),
}


@pytest.mark.parametrize(("change", "message"), NOT_PASSED_OVER.values(), ids=NOT_PASSED_OVER)
def test_what_may_be_good_is_refused_rather_than_passed_over(tmp_path, change, message):
    save(tmp_path, 1, 2)
    change(tmp_path / "step_00000002")
    assert re.search(message, load(tmp_path))


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors"])
def test_no_older_checkpoint_is_taken_for_one_that_cannot_be_read(tmp_path, monkeypatch, name):
    """As over a network: for a moment, which costs no step, and for longer."""
    save(tmp_path, 1, 2)
    real, failures, pauses = os.open, [2], []

    def opened(path, *args, **kwargs):
        if str(path).endswith(f"step_00000002/{name}") and len(pauses) < failures[0]:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert load(tmp_path) == 2
    assert pauses[0] < pauses[1]
    failures[0] = 10**6
    assert re.search(f"{name} cannot be read: .* choose another", load(tmp_path))


# Disks


def _save_to_a_full_disk(rank, world, directory):
    model, mesh = nn.Linear(6, 9000), init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    fk.checkpoint_save(state, directory, blocking=True)
    state = fk.donate(state, step=2)
    limit = file_size_limit(100_000) if rank == 1 else nullcontext()
    with limit, pytest.raises(fk.CheckpointError) as failure:
        fk.checkpoint_save(state, directory, blocking=True)
    dist.barrier()
    left = sorted(os.listdir(directory))
    dist.barrier()  # the next save has a temporary directory
    fk.checkpoint_save(state, directory, blocking=True)  # there is room again
    return str(failure.value), left, fk.checkpoint_load(state, directory).step


def test_a_disk_that_is_full_after_some_bytes_leaves_what_was_there(tmp_path):
    for message, left, step in run_again(_save_to_a_full_disk, 2, tmp_path / "runs"):
        assert re.search("step 2 could .*: rank 1: File too large.*Earlier .* untouched", message)
        assert (left, step) == (["latest", "step_00000000"], 2)


def is_directory(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def test_whichever_sync_fails_the_newest_committed_one_is_whole(tmp_path, monkeypatch, caplog):
    """The order of contents, manifest, rename and symlink, from the outside."""
    fsync, calls, failing = os.fsync, [], [0]

    def fail_at(descriptor):
        calls.append(descriptor)
        if len(calls) == failing[0]:  # a file system that syncs no directories syncs files
            raise OSError(errno.EIO if is_directory(descriptor) else errno.EINVAL, "No sync")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_at)
    (tmp_path / "good").mkdir()
    save(tmp_path / "good", 1)
    syncs, newest = len(calls), []
    for failing[0] in range(1, syncs + 1):
        calls.clear()
        directory = tmp_path / str(failing[0])
        shutil.copytree(tmp_path / "good", directory, symlinks=True)
        if failing[0] < syncs:  # until the new name is durable; then comes `latest`
            with pytest.raises(fk.CheckpointError, match="No sync"):
                save(directory, 2, keep=1)
            assert (directory / "step_00000001").exists()  # nothing older is deleted for it
        else:
            assert save(directory, 2, keep=1) == directory / "step_00000002"
            assert "No sync" in caplog.messages[-1]
        newest.append(load(directory))
        assert (directory / "latest" / "manifest.json").exists()
        assert not list(directory.glob(".*"))
    # Before the sync of its new name the checkpoint is there, and is not reported as saved.
    assert newest == [1] * (syncs - 2) + [2] * 2


def refuse(monkeypatch, owner, name, condition, number):
    """Let a call fail whose first argument meets a condition."""
    real = getattr(owner, name)

    def call(first, *rest):
        if condition(first):
            raise OSError(number, os.strerror(number))
        return real(first, *rest)

    monkeypatch.setattr(owner, name, call)


def test_failing_to_replace_a_step_keeps_the_one_that_was_there(tmp_path, monkeypatch):
    save(tmp_path, 2)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)  # names cannot be exchanged
    refuse(monkeypatch, Path, "rename", lambda path: path.name.endswith(".new"), errno.EIO)
    with pytest.raises(fk.CheckpointError, match="Input/output error"):
        fk.checkpoint_save(build(seed=1, step=2), tmp_path, blocking=True)
    assert load(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


def latest_is_a_directory(directory, monkeypatch):
    (directory / "latest").unlink()
    (directory / "latest" / "mine").mkdir(parents=True)


def an_unreadable_manifest(directory, monkeypatch):
    """In step 0, which is older than the one whose run goes on."""
    (directory / "step_00000000").mkdir()
    os.mkfifo(directory / "step_00000000" / "manifest.json")


COMMITTED = {
    "latest does not point to step_00000002: ": latest_is_a_directory,
    "cannot sync directories.*Invalid arg": lambda directory, monkeypatch: refuse(
        monkeypatch, os, "fsync", is_directory, errno.EINVAL
    ),
    "older ones could not be deleted: .*Not a regular file": an_unreadable_manifest,
    "could not delete the old checkpoint .*0001: .*Perm": lambda directory, monkeypatch: refuse(
        monkeypatch, Path, "rename", lambda path: path.name == "step_00000001", errno.EACCES
    ),
}


@pytest.mark.parametrize("message", COMMITTED)
def test_a_committed_checkpoint_is_never_reported_as_failed(tmp_path, monkeypatch, caplog, message):
    save(tmp_path, 1)
    COMMITTED[message](tmp_path, monkeypatch)
    path = save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert re.search(message, caplog.text), caplog.messages
    assert not list(tmp_path.glob(".*"))
    assert fk.latest_checkpoint(tmp_path) == path == tmp_path / "step_00000002"
