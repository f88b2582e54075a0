"""A run directory behind a URL is what the run has locally, whatever the store does meanwhile."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from contextlib import ExitStack, closing, contextmanager, redirect_stderr
from io import StringIO

import pytest
from buckets import FAULTS
from covering import some_of
from pool import run_ranks
from saved import save

import forgekit as fk
from forgekit.metrics.records import RowFile
from forgekit.ranks import CheckpointError
from forgekit.remote import urls
from forgekit.remote.urls import Url, UrlError, fs_of
from forgekit.run.mirror import LARGE_BYTES, held_run, local_copy
from forgekit.run.status import RunLockedError


@pytest.fixture
def url(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.02)
    yield Url("s3://bucket") / tmp_path.name
    bucket.heal()


@contextmanager
def opened(url, folder):
    folder.mkdir(exist_ok=True)
    with held_run(folder, url) as mirror:
        yield mirror


def objects(url, fs=None):
    fs = fs or fs_of(url)[0]
    root = fs._strip_protocol(url)
    return {name.removeprefix(f"{root}/"): fs.cat_file(name) for name in fs.find(root)}


def rows(folder, start=0):
    """The open ``metrics.jsonl`` of a run that goes on after a step."""
    return closing(RowFile(folder, start))


def write(file, *steps):
    for step in steps:
        file.write({"step": step, "train/loss": step / 3, "text": "x" * 40})


def logged(url):
    """The steps that the store has, and the whole ``metrics.jsonl``."""
    with local_copy(url) as copy:
        assert copy.name == url.name
        path = copy / "metrics.jsonl"
        return [row["step"] for row in fk.metrics.read_metrics(path)], path.read_bytes()


def test_a_fresh_folder_gets_what_the_run_had(memory, tmp_path):
    with opened(memory, tmp_path / "a") as mirror:
        (tmp_path / "a" / "samples").mkdir()
        files = {"config.json": b"{}", "history.jsonl": b'{"event": 1}\n', "samples/a.txt": b"def"}
        for name, content in files.items():
            (tmp_path / "a" / name).write_bytes(content)
        (tmp_path / "a" / ".status.json.17").write_bytes(b"half")  # of a write that goes on
        with rows(tmp_path / "a") as file:
            write(file, 1, 2, 3)
        mirror.flush()
        assert ".lease" in objects(memory)
    content = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert objects(memory) == {**files, "metrics.jsonl": content}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bad_steps.jsonl").write_bytes(b"left by a run that died here")
    with opened(memory, tmp_path / "b"):
        assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == content
        assert (tmp_path / "b" / "config.json").read_bytes() == b"{}"
        assert not (tmp_path / "b" / "bad_steps.jsonl").exists()
    assert logged(memory) == ([1, 2, 3], content)


def test_rows_of_several_lives_are_there_once_each(memory, tmp_path):
    """Also a row that grows after it was uploaded, and after going back."""
    for life, (start, end) in enumerate([(0, 8), (8, 12), (6, 7), (7, 16)]):
        folder = tmp_path / f"life-{life}"
        with opened(memory, folder) as mirror, ExitStack() as stack:
            file = stack.enter_context(rows(folder, start))
            for step in range(start + 1, end + 1):
                write(file, step)
                if step % 3 == 0:
                    mirror.flush()
                file.write({"step": step, "eval/loss": 1.5})
            if life == 1:  # rolled back while it runs
                file.close()
                with rows(folder, 3) as again:
                    write(again, *range(4, end + 1))
        assert logged(memory) == ([*range(1, end + 1)], (folder / "metrics.jsonl").read_bytes())


@pytest.mark.parametrize("fault", some_of(FAULTS, *{*FAULTS} - {"torn"}))
def test_whatever_the_store_does_all_of_it_arrives(url, bucket, tmp_path, fault):
    chance = random.Random(3)
    with opened(url, tmp_path / "a") as mirror:
        bucket.fault = lambda method, path: fault if chance.random() < 0.3 else None
        for step in range(1, 4):
            with rows(tmp_path / "a", step - 1) as file:
                write(file, step)
            (tmp_path / "a" / "status.json").write_text(json.dumps({"step": step}))
            mirror.settle()
    bucket.fault = lambda method, path: None
    assert bucket.done[fault] or bucket.done["drop"]
    assert logged(url)[1] == (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert objects(url)["status.json"] == b'{"step": 3}'


def test_a_store_that_is_down_at_the_end_fails_the_run_and_says_where_the_rest_is(
    url, bucket, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(urls, "PATIENCE_S", 0.0)

    def run(error=None):
        with opened(url, tmp_path / "a"):
            (tmp_path / "a" / "status.json").write_text("{}")
            bucket.fault = lambda method, path: "503"
            if error is not None:
                raise error

    with pytest.raises(UrlError, match="the store has failed for 0 s: "):
        run()
    bucket.heal()
    with pytest.raises(RuntimeError, match="of the run"):
        run(RuntimeError("an error of the run"))
    assert f"{tmp_path / 'a'} has what is not in {url}" in caplog.text


def test_what_has_not_changed_is_not_sent_again_and_large_files_wait(url, bucket, tmp_path):
    with opened(url, tmp_path / "a") as mirror:
        (tmp_path / "a" / "trace.json").write_bytes(b"x" * (LARGE_BYTES + 1))
        (tmp_path / "a" / "status.json").write_text("{}")
        with rows(tmp_path / "a") as file:
            write(file, 1)
        mirror.flush(all_files=False)
        seen = []
        bucket.fault = lambda method, path: seen.append(path.rpartition("/")[2])
        mirror.flush(all_files=False)
        assert seen == []
        mirror.flush()
        assert {*seen} == {"trace.json"}


OTHER = b"pid 7 on host other since today\nanother 3\n"
CUT_OFF = "was taken over by pid 7 on host other since today: this process has not renewed its"


def out_of_reach(bucket, url):
    """Another machine takes the lease over while this one cannot upload an object, for a while."""

    def heal():
        bucket.fs.pipe_file(f"{url}/.lease", OTHER)
        bucket.heal()

    bucket.fault = lambda method, path: "drop" if method == "PUT" else None
    threading.Timer(0.5, heal).start()


def test_what_a_writer_uploads_that_was_cut_off_counts_for_nothing(
    url, bucket, tmp_path, monkeypatch
):
    """Neither rows nor a checkpoint; nor does it delete what the other one is uploading."""
    monkeypatch.setattr("forgekit.run.lease.PERIOD_S", 0.3)
    checkpoints, uploaded = f"{url}/checkpoints", f"{url}/checkpoints/step_00000007/data-1/a"
    with opened(url, tmp_path / "a") as mirror, rows(tmp_path / "a") as file:
        write(file, 1)

        def cut_off(method, path):
            if not path.endswith("manifest.json"):
                return None
            out_of_reach(bucket, url)
            return "drop"

        for fault in (cut_off, lambda method, path: None):
            bucket.fault = fault
            with pytest.raises(CheckpointError, match=CUT_OFF):
                save(checkpoints, 0, before_commit=mirror.settle)
            assert fk.latest_checkpoint(checkpoints) is None
            bucket.fs.pipe_file(uploaded, b"of the other")
        before = objects(url, bucket.fs)
        write(file, 2)
        with pytest.raises(RunLockedError, match=CUT_OFF):
            mirror.flush()
        assert objects(url, bucket.fs) == before
        assert before[".lease"] == OTHER
        assert b"of the other" in before.values()
        file.close()
        (tmp_path / "a" / "metrics.jsonl").unlink()


# What a recipe says


REFUSED = [
    ("s3://nobody/run", {}, "the store refuses it: "),
    ("s4://bucket/run", {}, "fsspec does not know the scheme 's4'"),
    ("s3://bucket/run", {"AWS_ACCESS_KEY_ID": ""}, "Unable to locate credentials"),
]


def _refused(rank, world, variables):
    found = []
    for out, changes, _ in REFUSED:
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(StringIO()) as said:
            for name, value in (variables | changes).items():
                patch.setenv(name, value)
            patch.setattr("s3fs.S3FileSystem._cache", {})
            with pytest.raises(SystemExit) as stop, fk.open_run(Url(out), {}):
                raise AssertionError
        found.append((stop.value.code, said.getvalue()))
    return found


def test_all_ranks_refuse_a_bucket_that_one_writes(bucket, tmp_path):
    here = {"FORGEKIT_CACHE": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    first, second = run_ranks(_refused, 2, bucket.variables | here)
    assert second == [(2, "")] * len(REFUSED), "one sentence for all of them"
    for (code, said), (_, _, message) in zip(first, REFUSED, strict=True):
        assert code == 2
        assert message in said


def test_two_runs_in_one_folder_of_a_bucket(bucket, url, monkeypatch, capsys, tmp_path):
    """On one machine the lock of the local folder says it at once, elsewhere the lease."""
    monkeypatch.setenv("FORGEKIT_CACHE", str(tmp_path / "one"))
    monkeypatch.setattr("forgekit.run.lease.PERIOD_S", 0.6)
    with fk.open_run(url, {}) as run:
        assert run.checkpoints == f"{url}/checkpoints"
        for machine in ("one", "two"):
            monkeypatch.setenv("FORGEKIT_CACHE", str(tmp_path / machine))
            with pytest.raises(SystemExit) as stop, fk.open_run(url, {}):
                raise AssertionError
            assert stop.value.code == 1
            holder = f"pid {os.getpid()} on host {socket.gethostname()}"
            assert f"error: {url} is in use by {holder}" in capsys.readouterr().err
