"""One run at a time writes behind a URL; a crashed one loses its lease, and no clock matters."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from forgekit.remote.urls import Url, fs_of
from forgekit.run.lease import Lease, held
from forgekit.run.status import RunLockedError, lock_run

PERIOD_S, SHORT_S = 0.9, 0.4


@pytest.fixture(params=["memory", "s3"])
def url(request, bucket, tmp_path):
    if request.param == "memory":
        return request.getfixturevalue("memory")
    return Url("s3://bucket") / tmp_path.name


def content(url):
    """Who holds it, and how often it was renewed."""
    fs, root = fs_of(url)
    return fs.cat_file(f"{root}/.lease").decode().splitlines()[1].split()


def test_a_crashed_writer_loses_its_lease_whatever_its_clock_says(url, capsys):
    dead = Lease(url, SHORT_S)
    dead._name = f"pid {os.getpid()} on host gone since 2100-01-01"
    dead.take()
    time.sleep(0.3)
    dead.check()
    assert content(url) == [dead.owner, "2"], "one that was late keeps its lease"
    began = time.monotonic()
    alive = Lease(url, SHORT_S)
    alive.take()
    assert time.monotonic() - began >= SHORT_S
    assert f"s for pid {os.getpid()} on host gone" in capsys.readouterr().err
    assert content(url)[0] == alive.owner
    message = rf"{url} was taken over by pid \d+ on host .* It stops; everything that it saved"
    with pytest.raises(RunLockedError, match=message):
        dead.check(now=True)
    with pytest.raises(RunLockedError, match="was taken over"):
        dead.check_known()
    dead.release()
    alive.check(now=True)  # it was not the dead one's to delete


def test_of_two_that_find_no_lease_one_takes_it(url):
    first, second = (Lease(url, 0.2) for _ in range(2))  # each has seen that nobody holds it
    assert first._swap()
    assert not second._swap()
    first.check(now=True)


def test_the_note_of_a_crash_on_this_machine_makes_nobody_wait_where_the_folder_is_locked(
    memory, tmp_path
):
    """Its lock was free, so who wrote the note is dead; without a lock a note proves nothing."""
    dead = Lease(memory, 600.0)
    dead.take()
    (tmp_path / ".lease").write_text(dead.owner)
    with lock_run(tmp_path), held(memory, tmp_path, period_s=600.0) as lease:
        assert content(memory)[0] == lease.owner
        threading.Timer(0.2, lambda: lease.check(now=True)).start()
        with pytest.raises(RunLockedError, match="is in use by"):
            held(memory, tmp_path / "..", period_s=1.0).__enter__()


def test_a_renewal_whose_answer_is_lost_is_one(bucket):
    lease = Lease(Url("s3://bucket/unheard"), 30.0)
    lease.take()
    left = ["unheard"]
    bucket.fault = lambda method, path: left.pop() if method == "PUT" and left else None
    lease.check(now=True)
    assert bucket.done["unheard"] == 1
    bucket.heal()
    assert content(lease.url) == [lease.owner, "2"]


def test_a_start_with_patience_waits_for_a_writer_that_ends(memory, tmp_path):
    lease = Lease(memory, PERIOD_S)
    with ThreadPoolExecutor(1) as pool:
        with held(memory, tmp_path, period_s=PERIOD_S):
            waiting = pool.submit(lease.take, patience_s=60.0)
            time.sleep(PERIOD_S)
            assert not waiting.done()
        waiting.result()
    assert content(memory)[0] == lease.owner
