"""Replica groups under torchft's lighthouse: they are killed, come back, and train as one process.

The groups are real processes; `tests/chaos/test_replicas.py` kills more of them.
"""

from __future__ import annotations

import pytest
import replica_rank
from replica_groups import assert_each_sample_once, assert_undisturbed, groups

import forgekit as fk

STEPS = 9


PIPELINE = {"layout": {"pp": 2}, "layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, pytest.param(PIPELINE, marks=pytest.mark.chaos)], ids=str)
def test_a_rank_is_killed_its_group_comes_back_and_nothing_is_lost(tmp_path, given):
    with groups(tmp_path, steps=STEPS, seconds=0.1, **given) as run:
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
            assert_undisturbed(run.result(name), STEPS, given.get("layers", 1))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_all_start_again_from_checkpoints_stop_together_and_refuse_strangers(tmp_path, ranks):
    """The newest checkpoint wins; a group with other data is refused on all its ranks."""
    saved, stop = save_steps(tmp_path / "saved", (2, 5)), tmp_path / "stop"
    with groups(tmp_path, steps=400, seconds=0.1) as run:
        newer = run.prepare("newer", ranks, resume=str(saved[5]))
        older = run.prepare("older", ranks, resume=str(saved[2]), stop_file=str(stop))
        strangers = {kind: run.prepare(kind, ranks, other=kind) for kind in STRANGERS}
        strangers["layout"] = run.prepare("layout", 3 - ranks)
        for go in (newer, older, *strangers.values()):
            run.ready(go)
        newer.touch()
        run.wait_until(lambda: run.last_step() >= 5, "step 5")
        older.touch()
        run.wait_until(lambda: any(e["part"][1] == 2 for e in run.recent()), "step of both")
        for (kind, go), (_, job) in zip(strangers.items(), run.started[2:], strict=True):
            go.touch()
            assert job.end() != 0
            assert job.output.count("ValueError: this group cannot join: the ") == len(job.ranks)
            assert STRANGERS.get(kind, "the groups hold other shards: ") in job.output
        step = run.last_step()
        run.wait_until(lambda: run.last_step() > step, "step of the others")
        stop.touch()
        assert [job.end() for _, job in run.started[:2]] == [0, 0], run.output()
        assert min(e["step"] for e in run.events()) == 5
        last = run.result("newer")["step"]
        for name in ("newer", "older"):
            assert_undisturbed(run.result(name), last)


STRANGERS = {
    "data": "'rows' there, 'other rows' here. Give this one their data.",
    "settings": "the groups have lr 0.001, this one 0.002. Give it theirs.",
}


def save_steps(folder, steps):
    """Checkpoints of one process after some steps, each in a folder of its own."""
    state = replica_rank.build()
    loader = replica_rank.load(state, batch_size=replica_rank.GLOBAL_BATCH)
    for step in steps:
        state = replica_rank.train(state, loader, fk.OneGroup(), steps=step)
        fk.checkpoint_save(state, folder / str(step), blocking=True)
    return {step: folder / str(step) for step in steps}
