"""Prepares documents in processes that are killed at random moments, until one gets to the end.

Run as a script: ``kill_prepare.py kill SOURCE OUT SEED...`` or ``kill_prepare.py measure
SOURCE...``. Processes are forked from one that has imported everything and computed nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from forgekit.data.corpus import encode, held_out, prepare
from forgekit.data.corpus.journal import read_entry
from forgekit.data.documents.text_files import text_documents


def small_steps():
    """Many batches, journal entries and reports on little text."""
    encode.AT_ONCE, encode.PIECE, prepare.ENTRY_BYTES, held_out.REPORT_BYTES = 2000, 500, 3000, 1000


def make(source, out, **options):
    documents = text_documents(source, errors="skip")
    filters = {"short": lambda text: len(text) > 20}
    # Long enough that a kill hits the writing, and not always what comes before.
    options = {"held_out_every": 3, "shard_tokens": 5000, "sample_bytes": 20_000} | options
    report = lambda *_: time.sleep(0.001)  # noqa: E731
    prepare.prepare(documents, out, vocab_size=300, filters=filters, progress=report, **options)


def forked(work, *args, kill_after=None, **options):
    """Run in a child; return its exit status and resource usage, and how long it took."""
    began = time.perf_counter()
    pid = os.fork()
    if not pid:
        if kill_after is not None:
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            threading.Timer(kill_after, kill).start()
        try:
            work(*args, **options)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    return status, usage, time.perf_counter() - began


def kill(source, out, *seeds):
    """Print, for each seed, how many were killed and after how many documents each had an entry."""
    small_steps()
    status, _, seconds = forked(make, source, f"{out}-undisturbed")
    assert status == 0, status
    for seed in seeds:
        chance = random.Random(int(seed))
        entries, kills, status = [], 0, None
        while status != 0:
            delay = seconds * chance.uniform(0, 0.3 + 0.1 * kills)
            status, _, _ = forked(make, source, f"{out}-{seed}", kill_after=delay)
            assert status in (0, signal.SIGKILL), status
            kills += status != 0
            for folder in Path(out).parent.glob(f".{Path(out).name}-{seed}.*.new"):
                entry = read_entry(folder)
                entries.append(entry.position.documents if entry else 0)
        sys.stdout.write(json.dumps({"kills": kills, "entries": entries}) + "\n")


def measure(*sources):
    """Print the peak memory of preparing each source, in MB."""
    encode.AT_ONCE = encode.PIECE = 2**16
    peaks = []
    for source in sources:
        status, usage, _ = forked(make, source, f"{source}-out", shard_tokens=2**27)
        assert status == 0, status
        peaks.append(usage.ru_maxrss / 1024)
    sys.stdout.write(json.dumps(peaks) + "\n")


if __name__ == "__main__":
    {"kill": kill, "measure": measure}[sys.argv[1]](*sys.argv[2:])
