"""What goes wrong after a checkpoint is committed is logged, and the checkpoint is good."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest
from saved import build

import forgekit as fk


def is_directory(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def latest_is_a_directory(directory, monkeypatch):
    (directory / "latest").unlink(missing_ok=True)
    (directory / "latest" / "mine").mkdir(parents=True)


def no_directory_sync(directory, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if is_directory(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)


def unreadable_old_manifest(directory, monkeypatch):
    """In step 0, which is older than the one whose run goes on."""
    (directory / "step_00000000").mkdir()
    os.mkfifo(directory / "step_00000000" / "manifest.json")


def undeletable_old_one(directory, monkeypatch):
    rename = Path.rename

    def refuse_first(path, target):
        if path.name == "step_00000001":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_first)


TROUBLES = {
    "latest is a directory": (latest_is_a_directory, "latest does not point to step_00000002: "),
    "no directory sync": (no_directory_sync, "cannot sync directories.*Invalid arg"),
    "an unreadable old manifest": (
        unreadable_old_manifest,
        "is saved, but older ones could not be deleted: .*Not a regular file",
    ),
    "an old one stays": (undeletable_old_one, "could not delete the old checkpoint .*0001: .*Perm"),
}


@pytest.mark.parametrize(("trouble", "message"), TROUBLES.values(), ids=TROUBLES)
def test_a_committed_checkpoint_is_never_reported_as_failed(
    tmp_path, monkeypatch, caplog, trouble, message
):
    fk.checkpoint_save(build(step=1), tmp_path, blocking=True)
    trouble(tmp_path, monkeypatch)
    path = fk.checkpoint_save(build(step=2), tmp_path, keep=1).wait()
    assert path == tmp_path / "step_00000002"
    monkeypatch.undo()
    assert any(re.search(message, text) for text in caplog.messages), caplog.messages
    assert not list(tmp_path.glob(".*"))
    assert fk.latest_checkpoint(tmp_path) == path


def test_a_file_that_cannot_be_synced_still_fails_the_save(tmp_path, monkeypatch):
    def refuse(descriptor):
        if not is_directory(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(fk.CheckpointError, match=r"step 1 could not be saved to .*: Invalid argum"):
        fk.checkpoint_save(build(step=1), tmp_path, blocking=True)
