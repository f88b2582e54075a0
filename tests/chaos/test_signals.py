"""Asked to stop, whoever hears it and whenever, all ranks stop after the same step and save it."""

from __future__ import annotations

import signal

import pytest
from chaos.scene import MOST_LOST
from runs import last_step, saved_step, status_of

AFTER = 12
"""The vote travels in the next step, and is read two steps later."""
STUCK_AT = 40
"""Reads of a rank: two in a step, and some ahead."""


def assert_stopped(scene, life, reason, step=AFTER + 3):
    assert life.end() == [0, 0], life.output
    found = status_of(scene.out)
    assert (found["status"], found["reason"]) == ("stopped", reason)
    assert found["step"] == last_step(scene.out) == saved_step(scene.out)
    assert AFTER < found["step"] <= step, "it took more steps than the vote needs"


OTHER = pytest.param(0, "SIGTERM", marks=pytest.mark.chaos)


@pytest.mark.parametrize(("rank", "reason"), [OTHER, (1, "another rank")])
def test_a_signal_to_one_rank_stops_both(scene, survived, rank, reason):
    life = scene.live(faults={rank: {"signal_after": (AFTER, ["SIGTERM"])}}, steps=18)
    assert_stopped(scene, life, reason)
    survived("SIGTERM to one rank", scene.survive(life, lost=0, steps=18))


@pytest.mark.chaos
def test_a_second_signal_changes_nothing(scene, survived):
    twice = {"signal_after": (AFTER, ["SIGTERM", "SIGTERM"])}
    life = scene.live(faults={0: twice, 1: twice})
    assert_stopped(scene, life, "SIGTERM")
    survived("SIGTERM to all ranks, twice", scene.survive(life, lost=0))


@pytest.mark.chaos
def test_a_signal_during_an_evaluation(scene, survived):
    """The evaluation after step 12 ends first, and its numbers are those of the undisturbed run."""
    settings = {"eval_every": AFTER}
    life = scene.live(faults={1: {"signal_in_evaluation": "SIGTERM"}}, **settings)
    assert_stopped(scene, life, "another rank")
    survived("SIGTERM during an evaluation", scene.survive(life, lost=0, **settings))


@pytest.mark.chaos
def test_a_signal_while_rows_are_read(scene, survived):
    """A read that waits goes on when the handler has run."""
    life = scene.live(faults={1: {"signal_in_read": (AFTER, "SIGTERM")}}, data__workers=0)
    assert life.end() == [0, 0], life.output
    assert status_of(scene.out)["status"] == "stopped"
    survived("SIGTERM while rows are read", scene.survive(life, lost=0, data__workers=0))


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


@pytest.mark.chaos
def test_a_signal_while_the_last_checkpoint_is_written(scene, survived):
    """The loop has ended and the run has stopped listening to votes, but not to signals."""
    last = AFTER + 4
    again = ("os.rename", f"/step_{last:08d}", 1, "SIGTERM")
    faults = {"signal_after": (last - 3, ["SIGTERM"]), "signal_before": again}
    life = scene.live(faults={0: faults})
    assert_stopped(scene, life, "SIGTERM", step=last)
    outcome = scene.survive(life, lost=0)
    survived("SIGTERM again while the last checkpoint is written", outcome)
