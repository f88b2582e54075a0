"""Prepares documents in processes that are killed at random moments, until one gets to the end.

Moments are counted in reports of progress, so that they do not depend on how fast a machine is.

Run as a script: ``kill_prepare.py kill SOURCE OUT SEED...`` or ``kill_prepare.py measure
SOURCE...``. Processes are forked from one that has imported everything and computed nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from forgekit.data import prepare_corpus as prepare
from forgekit.data import tokenizer as encode
from forgekit.data.text_files import text_documents


def small_steps():
    """Many batches, parts and reports on little text."""
    encode.AT_ONCE, encode.PIECE, prepare.PART_BYTES, prepare.REPORT_BYTES = 2000, 500, 3000, 1000


def make(source, out, *, kill_after=None, count_to=None, **options):
    """Prepare; kill the process soon after a number of reports, or write how many there were."""
    reports = itertools.count(1)

    def report(*_):
        time.sleep(0.001)
        if next(reports) == kill_after:
            threading.Timer(
                random.uniform(0, 0.002), os.kill, (os.getpid(), signal.SIGKILL)
            ).start()

    documents = text_documents(source, errors="skip")
    # Long enough that a kill hits the writing, and not always what comes before.
    options = {"held_out_every": 3, "shard_tokens": 5000, "sample_bytes": 20_000} | options
    prepare.prepare(documents, out, vocab_size=300, progress=report, **options)
    if count_to is not None:
        count_to.write_text(str(next(reports) - 1))


def forked(work, *args, **options):
    """Run in a child; return its exit status and resource usage."""
    pid = os.fork()
    if not pid:
        try:
            work(*args, **options)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    return status, usage


def kill(source, out, *seeds):
    """Print, for each seed, how many were killed and how many finished parts each had left."""
    small_steps()
    counted = Path(f"{out}-reports")
    status, _ = forked(make, source, f"{out}-undisturbed", count_to=counted)
    assert status == 0, status
    reports = int(counted.read_text())
    for seed in seeds:
        chance = random.Random(int(seed))
        parts, kills, status = [], 0, None
        while status != 0:
            last = 1 + int(reports * chance.uniform(0.1, 0.5 + 0.1 * kills))
            status, _ = forked(make, source, f"{out}-{seed}", kill_after=last)
            assert status in (0, signal.SIGKILL), status
            kills += status != 0
            left = Path(out).parent.glob(f".{Path(out).name}-{seed}.*.new")
            parts += [len([*folder.glob("parts/*.npz")]) for folder in left]
        sys.stdout.write(json.dumps({"kills": kills, "parts": parts}) + "\n")


def measure(*sources):
    """Print the peak memory of preparing each source, in MB."""
    encode.AT_ONCE = encode.PIECE = prepare.PART_BYTES = 2**18
    peaks = []
    for source in sources:
        status, usage = forked(make, source, f"{source}-out", shard_tokens=2**16)
        assert status == 0, status
        peaks.append(usage.ru_maxrss / 1024)
    sys.stdout.write(json.dumps(peaks) + "\n")


if __name__ == "__main__":
    {"kill": kill, "measure": measure}[sys.argv[1]](*sys.argv[2:])
