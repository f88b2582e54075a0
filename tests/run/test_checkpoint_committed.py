"""What goes wrong after a checkpoint is committed is logged, and the checkpoint is good."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import forgekit as fk
from forgekit.checkpoints import save


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
    "an unreadable old manifest": (
        unreadable_old_manifest,
        "step_00000001 is kept and not counted: its manifest.json cannot be read: Not a regular",
    ),
    "retention": (failing_retention, "is saved, but older ones could not be deleted: .*Stale file"),
}


@pytest.mark.parametrize(("trouble", "message"), TROUBLES.values(), ids=TROUBLES)
def test_a_committed_checkpoint_is_never_reported_as_failed(
    tmp_path, monkeypatch, caplog, trouble, message
):
    fk.checkpoint_save(build(1), tmp_path, blocking=True)
    trouble(tmp_path, monkeypatch)
    path = fk.checkpoint_save(build(2), tmp_path, keep=1).wait()
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


def test_a_file_that_cannot_be_synced_still_fails_the_save(tmp_path, monkeypatch):
    def refuse(descriptor):
        if not is_directory(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(fk.CheckpointError, match=r"step 1 could not be saved to .*: Invalid argum"):
        fk.checkpoint_save(build(1), tmp_path, blocking=True)
