"""Prepares documents in processes that are killed at random moments, until one gets to the end.

Moments are counted in reports of progress, so that they do not depend on how fast a machine is.

Run as a script: ``kill_prepare.py SOURCE OUT SEED...``. Processes are forked from one that has
imported everything and computed nothing.
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


def make(source, out, *, kill_after=None, count_to=None):
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
    options = {"held_out_every": 3, "shard_tokens": 5000, "sample_bytes": 20_000}
    prepare.prepare(documents, out, vocab_size=300, progress=report, **options)
    if count_to is not None:
        count_to.write_text(str(next(reports) - 1))


def forked(work, *args, **options):
    """Run in a child; return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            work(*args, **options)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill(source, out, *seeds):
    """Print, for each seed, how many were killed and how many finished parts each had left."""
    small_steps()
    counted = Path(f"{out}-reports")
    status = forked(make, source, f"{out}-undisturbed", count_to=counted)
    assert status == 0, status
    reports = int(counted.read_text())
    for seed in seeds:
        chance = random.Random(int(seed))
        parts, kills, status = [], 0, None
        while status != 0:
            last = 1 + int(reports * chance.uniform(0.1, 0.5 + 0.1 * kills))
            status = forked(make, source, f"{out}-{seed}", kill_after=last)
            assert status in (0, signal.SIGKILL), status
            kills += status != 0
            left = Path(out).parent.glob(f".{Path(out).name}-{seed}.*.new")
            parts += [len([*folder.glob("parts/*.npz")]) for folder in left]
        sys.stdout.write(json.dumps({"kills": kills, "parts": parts}) + "\n")


if __name__ == "__main__":
    kill(*sys.argv[1:])
