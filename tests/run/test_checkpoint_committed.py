"""What goes wrong after a checkpoint is committed is logged, and the checkpoint is good."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

import forgekit as fk
from forgekit.checkpoints import save
from forgekit.checkpoints.directory import LocalStorage


def build(step=0):
    model = nn.Linear(4, 3)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return fk.donate(state, step=step)


def is_directory(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def latest_is_a_directory(directory, monkeypatch):
    (directory / "latest").unlink(missing_ok=True)
    (directory / "latest" / "mine").mkdir(parents=True)


def no_symlinks(directory, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)


def no_directory_sync(number):
    def prepare(directory, monkeypatch):
        fsync = os.fsync

        def refuse(descriptor):
            if is_directory(descriptor):
                raise OSError(number, os.strerror(number))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", refuse)

    return prepare


def broken_disk_after_the_rename(directory, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if (directory / "step_00000002").exists():
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


def unreadable_old_manifest(directory, monkeypatch):
    (directory / "step_00000001" / "manifest.json").unlink()
    os.mkfifo(directory / "step_00000001" / "manifest.json")


def failing_retention(directory, monkeypatch):
    def refuse(storage, keep, saved):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(save, "retain", refuse)


TROUBLES = {
    "latest is a directory": (latest_is_a_directory, "latest does not point to step_00000002: "),
    "no symlinks": (no_symlinks, "latest does not point to step_00000002: .*Operation not permit"),
    "no directory sync": (no_directory_sync(errno.EINVAL), "cannot sync directories.*Invalid arg"),
    "directory sync is unknown": (no_directory_sync(errno.ENOTSUP), "cannot sync directories"),
    "an unreadable old manifest": (
        unreadable_old_manifest,
        "step_00000001 is kept and not counted: its manifest.json cannot be read: Not a regular",
    ),
    "retention": (failing_retention, "is saved, but older ones could not be deleted: .*Stale file"),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(("trouble", "message"), TROUBLES.values(), ids=TROUBLES)
def test_a_committed_checkpoint_is_never_reported_as_failed(
    tmp_path, monkeypatch, caplog, trouble, message, blocking
):
    fk.checkpoint_save(build(1), tmp_path, blocking=True)
    trouble(tmp_path, monkeypatch)
    path = fk.checkpoint_save(build(2), tmp_path, keep=1, blocking=blocking).wait()
    assert path == tmp_path / "step_00000002"
    fk.run.wait_for_saves()
    monkeypatch.undo()
    assert any(re.search(message, text) for text in caplog.messages), caplog.messages
    assert not list(tmp_path.glob(".*"))
    assert fk.checkpoint_load(build(), tmp_path).step == 2
    assert fk.checkpoint_save(build(3), tmp_path).wait().name == "step_00000003"


def test_a_name_that_is_not_durable_is_not_reported_and_costs_no_older_checkpoint(
    tmp_path, monkeypatch
):
    fk.checkpoint_save(build(1), tmp_path, blocking=True)
    broken_disk_after_the_rename(tmp_path, monkeypatch)
    with pytest.raises(fk.CheckpointError, match="step 2 could not be saved to"):
        fk.checkpoint_save(build(2), tmp_path, keep=1, blocking=True)
    assert (tmp_path / "step_00000001" / "manifest.json").exists()


def _lost_after_the_commit(rank, world, directory):
    """The first rank commits, and then the others cannot hear of it."""
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(nn.Linear(4, 3), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = fk.TrainState.create(model, optimizer, mesh=mesh)
    broadcast = torch.distributed.broadcast_object_list

    def lost(*args, **kwargs):
        broadcast(*args, **kwargs)
        if (directory / "step_00000000").exists() and rank == 0:
            raise RuntimeError("Connection closed by peer")

    torch.distributed.broadcast_object_list = lost
    try:
        return fk.checkpoint_save(state, directory).wait().name
    finally:
        torch.distributed.broadcast_object_list = broadcast


def test_a_rank_that_is_lost_after_the_commit_does_not_undo_it(tmp_path):
    assert run_ranks(_lost_after_the_commit, 2, tmp_path) == ["step_00000000"] * 2


def test_a_file_that_cannot_be_synced_still_fails_the_save(tmp_path, monkeypatch):
    def refuse(descriptor):
        if not is_directory(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(fk.CheckpointError, match=r"step 1 could not be saved to .*: Invalid argum"):
        fk.checkpoint_save(build(1), tmp_path, blocking=True)


FOREIGN = {
    "other names": [".old-notes", ".tmp-mine", ".tmp-step_00000001", ".old-step_1-ab"],
    "nearly ours": [".old-step_00000001-mine", ".tmp-step_00000001-backup", ".tmp-latest"],
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
def test_hidden_directories_of_others_are_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-latest-link").symlink_to("nowhere")
    (tmp_path / ".old-step_00000001-0a").write_text("a file")
    for step in (1, 2, 3):
        fk.checkpoint_save(build(step), tmp_path, keep=1, blocking=True)
    assert fk.checkpoint_load(build(), tmp_path).step == 3
    for name in names:
        assert (tmp_path / name / "notes.txt").read_text() == "mine"
    assert (tmp_path / ".tmp-latest-link").is_symlink()
    assert (tmp_path / ".old-step_00000001-0a").read_text() == "a file"


def test_a_link_of_somebody_else_is_not_followed(tmp_path):
    """Even one that is called as a save would call a directory."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".tmp-step_00000001-0a1b2c3d").symlink_to("../mine")
    LocalStorage(tmp_path / "runs").remove_leftovers()
    assert (tmp_path / "mine").is_dir()
    assert (tmp_path / "runs" / ".tmp-step_00000001-0a1b2c3d").is_symlink()
