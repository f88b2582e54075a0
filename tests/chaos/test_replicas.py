"""Three replica groups of two ranks, killed at random five times twenty times: nothing is lost.

A kill hits a rank, a whole group, or the rank that speaks to the lighthouse for its group. The
replacement was started ahead and joins as soon as the others have taken a step without it.
"""

from __future__ import annotations

import random
import statistics
import time

import pytest
from replica_groups import HEARTBEAT_S, assert_each_sample_once, assert_undisturbed, groups

KILLS = 20
NAMES = ("a", "b", "c")
RECOVERY_S = 5.0
"""Beyond the heartbeat, from a kill to the next step that a survivor has committed."""
KINDS = ("rank", "group", "client of the lighthouse")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


def kill(job, kind, draw):
    """Kill what a kind says; of a group torn apart the other rank has to end by itself."""
    ranks = {"rank": draw.sample(job.ranks[1:], 1), "group": job.ranks}
    for rank in ranks.get(kind, job.ranks[:1]):
        rank.kill()


@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_lose_nothing(tmp_path, seed):
    draw = random.Random(seed)
    stop = tmp_path / "stop"
    with groups(tmp_path, steps=10**6, seconds=0.1, stop_file=str(stop)) as run:
        alive = {}
        for name in NAMES:
            alive[name] = run.prepare(name, 2)
        for go in alive.values():
            run.ready(go)
        for go in alive.values():
            go.touch()
        job_of = dict(run.started)
        seconds = []
        names = draw.choices(NAMES, k=KILLS)
        spare = run.prepare(names[0], 2)
        run.wait_until(lambda: run.last_step() >= 2, "step 2")
        for number, name in enumerate(names):
            run.ready(spare)
            time.sleep(draw.uniform(0, 0.3))
            victims = {rank.pid for rank in job_of[name].ranks}
            killed = time.time()
            kill(job_of[name], KINDS[number % 3], draw)
            seconds.append(run.next_update(killed, victims) - killed)
            spare.touch()
            job_of[name] = run.started[-1][1]
            joined = {rank.pid for rank in job_of[name].ranks}
            if number + 1 < KILLS:
                spare = run.prepare(names[number + 1], 2)
            run.wait_until(lambda joined=joined: run.has_committed(joined), f"return of {name}")
        stop.touch()
        assert {name: job_of[name].end() for name in NAMES} == dict.fromkeys(NAMES, 0), run.output()
        steps = {name: run.result(name)["step"] for name in NAMES}
        assert len(set(steps.values())) == 1, steps
        for name in NAMES:
            assert_undisturbed(run.result(name), steps[name])
        assert_each_sample_once(run.events(), steps["a"])
    assert statistics.median(seconds) <= HEARTBEAT_S + RECOVERY_S, sorted(seconds)
