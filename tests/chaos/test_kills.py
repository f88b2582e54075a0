"""Killed at any moment, a run goes on from its newest checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter

import pytest
from chaos.scene import (
    GLOBAL_BATCH,
    MOST_LOST,
    ROWS,
    SEQ_LEN,
    check_checkpoints,
    resumed_step,
)
from chaos.survival import Outcome
from runs import assert_same_run, last_step, saved_step, status_of

SAVE_OFTEN = 2
EPOCH = ROWS // GLOBAL_BATCH


@pytest.fixture
def chance(scene, tmp_path):
    """Draw calls to die at: during set-up, or within some steps of a resumed run."""
    out, scene.out = scene.out, tmp_path / "measured"
    calls = tmp_path / "calls"
    assert scene.live(steps=2, eval_every=0).end() == [0, 0]
    assert scene.live(steps=10, faults={0: {"count_calls": str(calls)}}).end() == [0, 0]
    scene.out = out
    counted = dict(map(int, line.split()) for line in calls.read_text().splitlines())
    per_step = (counted[10] - counted[3]) / 7
    set_up = counted[3] - per_step

    def draw(random_number):
        if random_number.random() < 0.25:
            return random_number.uniform(0, set_up)
        return set_up + per_step * random_number.uniform(0, 3 * SAVE_OFTEN)

    return draw


def die_often(scene, draw, *, kills, steps, seed):
    """Kill a run so many times, then let it end; return how often what was going on."""
    settings = {"steps": steps, "save_every": SAVE_OFTEN}
    notes = [scene.out.with_name(f"rows-{rank}") for rank in range(2)]
    numbers, newest, during = random.Random(seed), 0, Counter()
    for _ in range(kills):
        faults = {rank: {"note_rows": str(path)} for rank, path in enumerate(notes)}
        faults[numbers.randrange(2)]["die_at_call"] = int(draw(numbers))
        life = scene.live(faults=faults, **settings)
        assert life.end() == [-signal.SIGKILL] * 2, life.output
        if was_set_up := ", set up in " in life.output:
            assert resumed_step(life) == newest, life.output
        assert check_checkpoints(scene.out) >= newest, "what was committed is gone"
        newest = saved_step(scene.out)
        assert last_step(scene.out) - newest <= 2 * SAVE_OFTEN
        assert not last_step(scene.out) or status_of(scene.out)["status"] == "running"
        during["set-up"] += not was_set_up
        during["save"] += bool(list(scene.out.glob("checkpoints/.step_*.new")))
    faults = {rank: {"note_rows": str(path)} for rank, path in enumerate(notes)}
    life = scene.live(faults=faults, **settings)
    assert life.end() == [0, 0], life.output
    assert resumed_step(life) == newest
    assert_same_run(scene.out, scene.undisturbed(2, **settings))
    assert_each_row_once(notes, steps)
    return during


def assert_each_row_once(notes, steps):
    """What was done last for a step is what counts: the lives before were rolled back."""
    ranks = [dict(map(json.loads, path.read_text().splitlines())) for path in notes]
    for epoch in range(0, steps, EPOCH):
        of_epoch = range(epoch + 1, epoch + 1 + EPOCH)
        rows = [token // SEQ_LEN for steps in ranks for at in of_epoch for token in steps[at]]
        assert sorted(rows) == list(range(ROWS))


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_killed_a_hundred_times(scene, chance, survived):
    during = die_often(scene, chance, kills=100, steps=150, seed=2)
    assert during["set-up"] >= 5
    assert during["save"] >= 5
    outcome = Outcome(ended="killed", status="running", lost=2 * SAVE_OFTEN)
    survived("all ranks, at 100 random moments one after the other", outcome)


WRITER = pytest.param(0, "running", marks=pytest.mark.chaos)


@pytest.mark.parametrize(("rank", "status"), [WRITER, (1, "failed")])
def test_one_rank_is_killed_and_the_other_ends(scene, survived, rank, status):
    """The first rank writes the status: it cannot if it was the one."""
    life = scene.live(faults={rank: {"die_alone_after": 12}}, steps=18)
    outcome = scene.survive(life, lost=MOST_LOST, steps=18)
    assert outcome.status == status
    assert "Connection" in life.output
    survived(f"rank {rank} alone", outcome)


@pytest.mark.chaos
def test_killed_while_the_metrics_are_cut_back(scene, survived):
    """In a resumed run, which drops the rows after its checkpoint before it does anything."""
    life = scene.live(faults={1: {"die_alone_after": 12}})
    life.end()
    cut = {"die_before": ("open", "/metrics.jsonl -> r+", 1)}
    outcome = scene.survive(scene.live(faults={0: cut}), lost=MOST_LOST)
    assert outcome.ended == "killed"
    survived("while `metrics.jsonl` is cut back", outcome)
