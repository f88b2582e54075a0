"""The recipe with training ranks and generators of their own, over Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from runs import launch, rows_of, saved_step, status_of

from forgekit.cli import recipes_folder

SMALL = ("global_batch_size=4", "batch_size=2", "answers=4", "save_every=2", "ahead=2")


def test_two_ranks_train_on_what_generators_send_and_go_on_after_a_kill(tmp_path, redis_url):
    out = tmp_path / "run"
    words = [f"out={out}", f"redis={redis_url}", *SMALL]
    with ExitStack() as stack:
        generating = [*words, "role=generate"]
        generators = [
            stack.enter_context(launch("rollout", generating, log=tmp_path / f"generator{number}"))
            for number in range(2)
        ]
        with launch("rollout", [*words, "steps=1000"], ranks=2, log=tmp_path / "killed") as job:
            job.wait_for(lambda: saved_step(out) >= 2, "the second step")
            job.kill()
        goal = saved_step(out) + 4
        with launch("rollout", [*words, f"steps={goal}"], ranks=2, log=tmp_path / "last") as job:
            assert job.end() == 0, job.output
        assert all(generator.members() for generator in generators)
    assert status_of(out)["status"] == "finished"
    last = rows_of(out)[-1]
    assert last["step"] == saved_step(out) == goal
    assert last["samples"] == 4 * goal
    assert last["rollout/length"] > 1
    # At most 2 messages wait, 2 generators work, and 4 are trained in each step, of which every
    # second one publishes.
    assert 0 < last["rollout/staleness"] <= 4


@pytest.mark.oracle
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_five_seeds_of_five_learn_the_task(tmp_path, seed):
    script = recipes_folder() / "rollout.py"
    words = [f"out={tmp_path}", f"seed={seed}", "save_every=150"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests run beside each other
    subprocess.run([sys.executable, script, *words], check=True, env=alone)
    rewards = [row["rollout/reward"] for row in rows_of(tmp_path)]
    assert rewards[0] < 0.2
    assert min(rewards[-3:]) > 0.9
