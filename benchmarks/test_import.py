"""What ``import forgekit`` adds to importing the libraries that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pairs import Times

ROUNDS = 8
MOST_SECONDS = 0.2
LIBRARIES, OURS = "torch, tensordict, torch.distributed.fsdp", "forgekit"
CODE = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


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
    added = min(times[name]) - min(times[LIBRARIES])
    show("import", times, name, added_seconds=added)
    assert added <= MOST_SECONDS, f"import forgekit adds {added:.3f} s"
