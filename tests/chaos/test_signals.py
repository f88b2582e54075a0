"""Asked to stop, whoever hears it and whenever, all ranks stop after the same step and save it."""

from __future__ import annotations

import signal

import pytest
from chaos.scene import MOST_LOST, in_short
from runs import last_step, saved_step, status_of

AFTER = 12
"""The vote travels in the next step, and is read two steps later."""
STUCK_AT = 40
"""Reads of a rank: two in a step, and some ahead."""


def assert_stopped(scene, life, reason, step):
    assert life.end() == [0, 0], life.output
    found = status_of(scene.out)
    assert (found["status"], found["reason"]) == ("stopped", reason)
    assert found["step"] == last_step(scene.out) == saved_step(scene.out)
    assert AFTER < found["step"] <= step, "it took more steps than the vote needs"


ONCE, TWICE = ({"signal_after": (AFTER, ["SIGTERM"] * times)} for times in (1, 2))
LAST = AFTER + 4
# The loop has ended and the run has stopped listening to votes, but not to signals.
AGAIN = {"signal_before": ("os.rename", f"/step_{LAST:08d}", 1, "SIGTERM")}
AGAIN |= {"signal_after": (LAST - 3, ["SIGTERM"])}
EVALUATES, READS = {"signal_in_evaluation": "SIGTERM"}, {"signal_in_read": (AFTER, "SIGTERM")}
CASES = {
    "SIGTERM to one rank": ({1: ONCE}, "another rank", {"steps": 18}),
    "SIGTERM to all ranks, twice": ({0: TWICE, 1: TWICE}, "SIGTERM", {}),
    # The evaluation after step 12 ends first; its numbers are those of the undisturbed run.
    "SIGTERM during an evaluation": ({1: EVALUATES}, "another rank", {"eval_every": AFTER}),
    "SIGTERM again while the last checkpoint is written": ({0: AGAIN}, "SIGTERM", {}),
    # A read that waits goes on when the handler has run.
    "SIGTERM while rows are read": ({1: READS}, "another rank", {"data__workers": 0}),
}


@pytest.mark.parametrize("name", in_short(CASES, "SIGTERM to one rank"))
def test_a_signal_stops_all_ranks(scene, survived, name):
    faults, reason, settings = CASES[name]
    life = scene.live(faults=faults, **settings)
    assert_stopped(scene, life, reason, step=LAST if faults == {0: AGAIN} else AFTER + 3)
    survived(name, scene.survive(life, lost=0, **settings))


@pytest.mark.chaos
def test_a_signal_while_the_data_of_one_rank_are_stuck(scene, survived, tmp_path):
    """It never gets to the vote; both give up, and the last committed checkpoint counts."""
    mark = tmp_path / "mark"
    faults = {0: {"impatient": 0.5}, 1: {"impatient": 0.5, "stuck_read": (STUCK_AT, str(mark))}}
    life = scene.live(faults=faults)
    life.wait_for(mark.exists, "the read that is stuck")
    for rank in life.ranks:
        rank.send_signal(signal.SIGTERM)
    assert life.end() == [1, 1], life.output
    found = status_of(scene.out)
    assert (found["status"], found["step"]) == ("stopped", saved_step(scene.out))
    assert found["reason"] == "SIGTERM, and another rank has given up"
    outcome = scene.survive(life, lost=MOST_LOST)
    survived("SIGTERM to all ranks while the data of one are stuck", outcome)
