"""Replica groups under torchft's lighthouse: they are killed, come back, and train as one process.

The groups are real processes; `tests/chaos/test_replicas.py` kills more of them.
"""

from __future__ import annotations

import pytest
from replica_groups import assert_each_sample_once, assert_undisturbed, groups

STEPS = 12


@pytest.mark.slow
def test_a_rank_is_killed_its_group_comes_back_and_nothing_is_lost(tmp_path):
    with groups(tmp_path, steps=STEPS, seconds=0.2) as run:
        first, second = run.prepare("first", 2), run.prepare("second", 2, die_at=3)
        again = run.prepare("second", 2)
        for go in (first, second, again):
            run.ready(go)
        first.touch()
        second.touch()
        run.wait_until(lambda: run.last_step() >= 4, "step of the survivors")
        again.touch()
        assert [run.started[number][1].end() for number in (0, 2)] == [0, 0], run.output()
        events = run.events()
        assert {tuple(e["part"]) for e in events} == {(0, 1), (0, 2), (1, 2)}
        assert any(e["event"] == "breaks off" for e in events)
        assert_each_sample_once(events, STEPS)
        for name in ("first", "second"):
            assert_undisturbed(run.result(name), STEPS)
