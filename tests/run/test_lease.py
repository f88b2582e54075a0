"""One run at a time writes behind a URL; a crashed one loses its lease, and no clock matters."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from buckets import open_bucket
from fsspec.implementations.memory import MemoryFileSystem

from forgekit.remote.urls import Url, fs_of
from forgekit.run.lease import Lease, held
from forgekit.run.status import RunLockedError, lock_run

PERIOD_S, SHORT_S = 1.5, 0.6


@pytest.fixture(scope="module")
def bucket():
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture(params=["memory://bucket", "s3://bucket"])
def url(request, bucket, tmp_path):
    yield Url(request.param) / tmp_path.name
    MemoryFileSystem.store.clear()


def content(url):
    """Who holds it, and how often it was renewed."""
    fs, root = fs_of(url)
    owner, beat = fs.cat_file(f"{root}/.lease").decode().splitlines()[1].split()
    return {"owner": owner, "beat": int(beat)}


def test_a_second_writer_is_refused_by_name_and_a_clean_end_makes_nobody_wait(url, tmp_path):
    with held(url, tmp_path, period_s=PERIOD_S):
        began = time.monotonic()
        message = rf"{url} is in use by pid {os.getpid()} on host {socket.gethostname()} since 20"
        with pytest.raises(RunLockedError, match=message):
            Lease(url, PERIOD_S).take()
        assert time.monotonic() - began < PERIOD_S  # as soon as it is seen to be renewed
    with held(url, tmp_path / "..", period_s=600.0):
        pass


def test_a_crashed_writer_loses_its_lease_whatever_its_clock_says(url, capsys):
    dead = Lease(url, SHORT_S)
    dead._name = f"pid {os.getpid()} on host gone since 2100-01-01"
    dead.take()
    time.sleep(0.4)
    dead.check()
    assert content(url)["beat"] == 2, "one that was late keeps its lease"
    began = time.monotonic()
    alive = Lease(url, SHORT_S)
    alive.take()
    assert time.monotonic() - began >= SHORT_S
    assert f"waiting up to 1 s for pid {os.getpid()} on" in capsys.readouterr().err
    assert content(url)["owner"] == alive.owner
    message = rf"{url} was taken over by pid \d+ on host .* It stops; what it has saved before"
    with pytest.raises(RunLockedError, match=message):
        dead.check(now=True)
    with pytest.raises(RunLockedError, match="was taken over"):
        dead.check_known()
    dead.release()
    alive.check(now=True)  # it was not the dead one's to delete


def test_of_two_that_find_no_lease_one_takes_it(url):
    leases = [Lease(url, 0.2) for _ in range(2)]
    for lease in leases:  # each has seen that nobody holds it
        assert lease._there == b""
    assert leases[0]._swap()
    assert not leases[1]._swap()
    leases[0].check(now=True)


def test_a_crash_on_this_machine_makes_nobody_wait(url, tmp_path):
    """The folder's lock is free, so whoever wrote its note is dead."""
    dead = Lease(url, 600.0)
    dead.take()
    (tmp_path / ".lease").write_text(dead.owner)
    with lock_run(tmp_path), held(url, tmp_path, period_s=600.0) as lease:
        assert content(url)["owner"] == lease.owner


def test_where_the_folder_has_no_lock_a_note_proves_nothing(url, tmp_path):
    holder = Lease(url, PERIOD_S)
    holder.take()
    (tmp_path / ".lease").write_text(holder.owner)
    threading.Timer(0.3, lambda: holder.check(now=True)).start()
    with pytest.raises(RunLockedError, match="is in use by"), held(url, tmp_path, period_s=1.0):
        pass


def test_a_renewal_whose_answer_is_lost_is_one(bucket):
    lease = Lease(Url("s3://bucket/unheard"), 30.0)
    lease.take()
    left = ["unheard"]
    bucket.fault = lambda method, path: left.pop() if method == "PUT" and left else None
    try:
        lease.check(now=True)
        assert bucket.done["unheard"] == 1
    finally:
        bucket.heal()
    assert content(lease.url)["beat"] == lease._beat


@pytest.mark.parametrize("ends", [True, False])
def test_a_start_with_patience_waits_for_a_writer_that_ends(url, tmp_path, ends):
    over, held_s = threading.Event(), 1.0

    def write():
        with held(url, tmp_path, period_s=PERIOD_S):
            over.wait(held_s if ends else 60.0)

    writer = threading.Thread(target=write)
    writer.start()
    while not (tmp_path / ".lease").exists():
        time.sleep(0.01)
    lease = Lease(url, PERIOD_S)
    try:
        if ends:
            lease.take(patience_s=60.0)
            assert content(url)["owner"] == lease.owner
        else:
            with pytest.raises(RunLockedError, match=f"{url} is in use by pid {os.getpid()} on"):
                lease.take(patience_s=1.0)
            assert content(url)["owner"] != lease.owner
    finally:
        over.set()
        writer.join()
