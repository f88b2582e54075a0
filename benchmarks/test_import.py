"""What all of forgekit adds to importing the libraries that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pairs import Times

ROUNDS = 8
MOST = 1.10
"""Of the time that the libraries take by themselves."""
LIBRARIES, OURS = "import torch, tensordict, torch.distributed.fsdp", "from forgekit import *"
CODE = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


@pytest.fixture(scope="module")
def times() -> Times:
    """Seconds of fresh interpreters, in turns; the first round fills caches and is not kept."""
    times: Times = {LIBRARIES: [], OURS: []}
    for _ in range(ROUNDS + 1):
        for name, seconds in times.items():
            command = [sys.executable, "-c", CODE.format(name)]
            seconds.append(float(subprocess.check_output(command)))
    return {name: seconds[1:] for name, seconds in times.items()}


@pytest.mark.parametrize("name", [LIBRARIES, OURS])
def test_import_time(show, times, name):
    # The best of each: whatever disturbs an import only ever makes it longer.
    ratio = min(times[name]) / min(times[LIBRARIES])
    show("import", times, name, ratio=ratio)
    assert ratio <= MOST, f"all of forgekit takes {ratio:.3f} of its libraries"
