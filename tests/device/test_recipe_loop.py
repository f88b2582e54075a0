"""Loops of recipes on the pretend device, where each wait of the host is counted."""

from __future__ import annotations

import numpy as np
import pytest
from device.pretend import PEAK, watching
from pool import run_ranks
from runs import arguments, rows_of, run_here

import forgekit as fk

STEPS = 8
EXPERTS = {"experts": 4, "top_k": 2, "ffn_dim": 16, "first": 1}
LOOPS = {
    "pretrain": {"spikes": 9.0, "bad_steps": "roll_back", "patience": 2},
    "moe": {f"model.moe.{name}": size for name, size in EXPERTS.items()} | {"loads_every": 100},
}


def _waits(_rank, _world, recipe, out):
    """What the host has waited for at the beginning of each step, and how many rows there are."""
    ids = (np.arange(start, start + 40) % 63 for start in range(40))
    fk.write_tokens(out / "data", ids, vocab_size=64, eos_id=63)
    found, make_step = [], fk.make_step

    def counting(*args, **options):
        step = make_step(*args, **options)

        def counted(state, batches):
            found.append([*ledger.waits])
            return step(state, batches)

        return counted

    run = out / "run"
    given = {"steps": STEPS, "save_every": 0, "log_every": 2, **LOOPS[recipe]}
    with pytest.MonkeyPatch.context() as patch, watching() as ledger:
        patch.setattr(fk, "make_step", counting)
        words = arguments(out=run, data__path=out / "data", **given)
        run_here(recipe, [word for word in words if not word.startswith("device=")])
    assert all(row["memory/peak_gib"] == PEAK / 2**30 for row in rows_of(run)), "not on the device"
    return found, [row["step"] for row in rows_of(run)]


@pytest.mark.parametrize("recipe", LOOPS)
def test_from_the_first_step_to_the_last_the_host_waits_once_for_each_row(recipe, tmp_path):
    """And for nothing else: before the last step three rows were due."""
    setup = "device.pretend:install"
    ((waits, rows),) = run_ranks(_waits, 1, recipe, tmp_path, group=False, setup=setup)
    assert len(waits) == STEPS
    assert rows == [2, 4, 6, 8]
    later = waits[-1][len(waits[0]) :]
    assert len(later) == 3, later
    assert all("_read_row" in wait for wait in later), later
