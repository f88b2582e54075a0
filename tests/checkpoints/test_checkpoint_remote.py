"""Checkpoints behind URLs: the same promises without rename, lock and symlink."""

from __future__ import annotations

import errno
import re
from unittest.mock import patch

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from lab import train
from pool import run_again
from saved import assert_same, build, everything, load, save

import forgekit as fk
from forgekit.remote import urls


@pytest.fixture
def url(monkeypatch):
    """What fails once is not asked again, unless a test says so."""
    monkeypatch.setattr(urls, "PATIENCE_S", 0.0)
    yield "memory://runs/a"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def objects():
    """Names of all objects below the URL but ``latest``, without the random part of folders."""
    found = (name.removeprefix("/runs/a/") for name in sorted(MemoryFileSystem.store))
    return [re.sub("-[^/]*", "", name) for name in found if name != "latest"]


def whole(*steps):
    files = ("data/rank_00000.safetensors", "manifest.json")
    return [f"step_{step:08d}/{name}" for step in steps for name in files]


def test_what_retention_half_deletes_is_no_checkpoint(url, monkeypatch, caplog):
    real = MemoryFileSystem.rm

    def refuse(self, path, **options):
        if not path.endswith("manifest.json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(self, path, **options)

    save(url, 1)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "rm", refuse)
        save(url, 2, keep=1)
    assert "could not delete the old checkpoint memory://runs/a/step_00000001" in caplog.text
    assert objects() == [name for name in whole(1, 2) if name != "step_00000001/manifest.json"]
    save(url, 3)
    assert objects() == whole(2, 3)


def failing(monkeypatch, method, times, error):
    """Let the first calls of a method of the storage fail; return how many are left."""
    real, left = getattr(MemoryFileSystem, method), [times]

    def fails(self, *args, **options):
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return real(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, method, fails)
    return left


@pytest.mark.parametrize(("method", "step"), [("put_file", 3), ("pipe_file", 2), ("pipe_file", 3)])
def test_whatever_upload_fails_the_earlier_one_is_whole(url, monkeypatch, method, step):
    """Also where the same step is saved again, which then replaces it."""
    expected = everything(save(url, 2))
    failing(monkeypatch, method, 1, OSError(errno.EIO, "Input/output error"))
    other = train(build(seed=1), step)
    with pytest.raises(fk.CheckpointError, match=rf"step {step} could .* to memory://runs/a: .*"):
        fk.checkpoint_save(other, url, blocking=True)
    assert_same(everything(fk.checkpoint_load(build(), url)), expected)
    fk.checkpoint_save(other, url, blocking=True)  # clears what the failed save left
    assert_same(everything(fk.checkpoint_load(build(), url)), everything(other))
    assert objects() == (whole(2) if step == 2 else whole(2, 3))


@pytest.mark.parametrize("method", ["put_file", "pipe_file", "info", "ls", "rm"])
def test_what_fails_for_a_moment_fails_no_save(url, monkeypatch, method):
    monkeypatch.setattr(urls, "PATIENCE_S", 60.0)
    monkeypatch.setattr(urls.time, "sleep", lambda _: None)
    save(url, 1)
    left = failing(monkeypatch, method, 2, TimeoutError())
    save(url, 2, keep=1)
    assert left[0] < 0
    assert objects() == whole(2)
    assert MemoryFileSystem().cat_file("/runs/a/latest") == b"step_00000002"


def test_a_commit_that_is_refused_is_none(url, tmp_path):
    """Neither there nor on a disk."""

    def refuse():
        raise RuntimeError("the rows of metrics are not there yet")

    for where in (url, str(tmp_path)):
        save(where, 1)
        with pytest.raises(fk.CheckpointError, match=r"step 2 could not be .* rows of metrics are"):
            save(where, 2, before_commit=refuse)
        assert str(fk.latest_checkpoint(where)) == f"{where}/step_00000001"


def test_an_upload_that_lost_bytes_is_not_committed(url, monkeypatch):
    put = MemoryFileSystem.put_file

    def lossy(self, local, remote, **options):
        put(self, local, remote, **options)
        self.pipe_file(remote, self.cat_file(remote)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", lossy)
    with pytest.raises(fk.CheckpointError, match=r"\d+ bytes have arrived instead of \d+"):
        save(url, 1)
    assert fk.latest_checkpoint(url) is None


def test_a_checkpoint_may_be_copied_to_a_disk_and_back(url, tmp_path):
    expected, fs = everything(save(url, 2)), MemoryFileSystem()
    fs.get("/runs/a/step_00000002", str(tmp_path / "step_00000002"), recursive=True)
    assert_same(load(0, 1, tmp_path), expected)
    save(tmp_path, 3, state=fk.checkpoint_load(build(), tmp_path))
    fs.put(str(tmp_path / "step_00000003"), "/runs/b/step_00000003", recursive=True)
    save("memory://runs/b", 4)  # clears leftovers, which this is none of
    assert fk.checkpoint_load(build(seed=1), "memory://runs/b", step=3).step == 3


def _save(rank, world, url):
    """Save; then one of the ranks fails."""
    put = LocalFileSystem.put_file

    def full(self, local, remote, **options):
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "shard")
        put(self, local, remote, **options)

    state = train(build(world), 2)
    assert fk.checkpoint_save(state, url).wait() == f"{url}/step_00000002"
    expected = everything(state)
    with (
        patch.multiple(urls, PATIENCE_S=0.0),
        patch.multiple(LocalFileSystem, put_file=full),
        pytest.raises(fk.CheckpointError) as failure,
    ):
        fk.checkpoint_save(train(state, 1), url, blocking=True)
    return expected, str(failure.value)


def test_two_ranks_save_and_any_number_loads_and_a_failure_on_one_is_raised_on_both(tmp_path):
    url = f"file://{tmp_path}/runs"
    both = run_again(_save, 2, url)
    for _, message in both:
        assert "1.safetensors: the store refuses it: OSError: No space left on device" in message
    assert len(list(tmp_path.glob("runs/step_00000002/data-*/rank_0000[01].safetensors"))) == 2
    for found in [*run_again(load, 2, url), load(0, 1, url)]:
        assert_same(found, both[0][0])
