"""A run goes on in another layout, with other workers: the same samples, the same losses."""

from __future__ import annotations

import json

import pytest
from chaos.scene import ROWS, SEQ_LEN, in_short, resumed_step
from chaos.survival import CLOSE, Outcome
from runs import assert_same_run, results, saved_step, status_of

import forgekit as fk

pytestmark = pytest.mark.timeout(300)
BATCH, STRETCH = 12, 6
SETTINGS = {"global_batch_size": BATCH, "model__dropout": 0.0, "model__tied": "false"}
SETTINGS |= {"optim__name": "adamw"}  # Muon iterates in bfloat16, so last bits of a sum go further
RANKS = [
    # Ranks, how many of them read different samples, and settings of the stretch.
    (4, 4, {"batch_size": 3, "data__workers": 0, "mesh__dp_replicate": 2}),
    (2, 2, {"batch_size": 3, "data__workers": 2}),
    (3, 3, {"batch_size": 4, "data__workers": 1}),
    (1, 1, {"batch_size": 6, "data__workers": 2}),
    (4, 4, {"batch_size": 1, "data__workers": 1}),
]
LAYOUTS = [
    (2, 2, {"batch_size": 2}),
    (2, 1, {"batch_size": 4, "mesh__tp": 2}),
    (2, 1, {"batch_size": 3, "mesh__pp": 2}),
    (2, 1, {"batch_size": 6, "mesh__cp": 2}),
]


FEW = [(2, 2, {"batch_size": 3, "mesh__dp_replicate": 2}), (1, 1, {"batch_size": 6})]


def live(scene, ranks, number, asked=None, readers=None, **settings):
    """Let a run live, until a rank or all get a signal after a step; what each step read first."""
    notes = [scene.out.with_name(f"rows-{number}-{rank}") for rank in range(ranks)]
    faults = {rank: {"note_rows": str(path)} for rank, path in enumerate(notes)}
    for rank in range(ranks) if asked else ():
        faults[rank]["signal_after"] = asked
    life, tokens = scene.live(ranks, faults, **settings), {}
    assert life.end() == [-9 if asked and "SIGKILL" in asked[1] else 0] * ranks, life.output
    for path in notes[:readers]:
        for step, starts in map(json.loads, path.read_text().splitlines()):
            tokens.setdefault(step, []).extend(starts)
    return life, tokens


def move(scene, stretches, steps):
    """Run some steps in each layout, the rest in the last; return the rows of each step."""
    rows, last = {}, len(stretches) - 1
    for number, (ranks, readers, settings) in enumerate(stretches):
        asked = ((number + 1) * STRETCH - 3, ["SIGTERM"]) if number < last else None
        given = SETTINGS | settings | {"steps": steps}
        life, tokens = live(scene, ranks, number, asked, readers, **given)
        assert resumed_step(life) == number * STRETCH
        assert status_of(scene.out)["status"] == ("stopped" if number < last else "finished")
        rows |= {step: [token // SEQ_LEN for token in of] for step, of in tokens.items()}
    return rows


MOVES = {
    "on 4, 2, 3, 1, 4 ranks with 0, 2, 1 workers": (RANKS, 30),
    "as FSDP 2, TP 2, PP 2, CP 2": (LAYOUTS, 30),
    "no row: HSDP 2, 1 rank": (FEW, 10),
}


@pytest.mark.parametrize("name", in_short(MOVES, "no row: HSDP 2, 1 rank"))
def test_a_run_moves(scene, survived, name):
    """To other ranks and workers, each sample once."""
    stretches, steps = MOVES[name]
    rows = move(scene, stretches, steps)
    assert saved_step(scene.out) == steps
    for step in range(1, steps + 1):
        samples = range((step - 1) * BATCH, step * BATCH)
        assert sorted(rows[step]) == sorted(fk.data.sample_rows(samples, ROWS, 0).tolist())
    one = scene.undisturbed(1, batch_size=BATCH, steps=steps, **SETTINGS)
    found = [(row["step"], row["train/loss"]) for row in results(scene.out)]
    assert [step for step, _ in found] == list(range(1, steps + 1))
    for (_, loss), row in zip(found, results(one), strict=True):
        assert loss == pytest.approx(row["train/loss"], rel=1e-6)
    if not name.startswith("no row"):
        survived(name, Outcome(ended="exit 0", status="stopped", lost=0, after=CLOSE))


LONG = f"{{start=48,global_batch_size=4,seq_len={SEQ_LEN}}}"
SIZES = SETTINGS | {"global_batch_size": 8, "batch_size": 2, "data__seq_len": SEQ_LEN // 2}
SIZES |= {"phases": f"[{{start=16,global_batch_size=16}},{LONG}]", "save_every": 2, "steps": 11}
LENGTHS = {step: SEQ_LEN // 2 if step <= 4 else SEQ_LEN for step in range(1, 12)}
"""Two steps of 8 rows, two of 16, then of 4 long ones; eight steps are an epoch."""


LIVES = {
    "same ranks": [(2, 5, "SIGKILL"), (2, None, None)],
    "others": [(2, 5, "SIGKILL"), (1, 6, "SIGTERM"), (2, None, None)],
}


@pytest.mark.parametrize("name", in_short(LIVES, "same ranks"))
def test_a_run_whose_sizes_change_goes_on_within_a_phase_and_trains_each_token_once(scene, name):
    """On the same ranks the same bits; on others the same tokens in each step, and losses."""
    starts, lives = {}, LIVES[name]
    for number, (ranks, step, kind) in enumerate(lives):
        _, of_life = live(scene, ranks, number, kind and (step, [kind]), **SIZES)
        starts |= of_life  # what was done last for a step is what counts
        assert (min(of_life) > 1) == (number > 0)  # the save of step 4 has waited for that of 2
    read = [(at, LENGTHS[step]) for step in range(1, 9) for at in starts[step]]
    epoch = [token for at, length in read for token in range(at, at + length)]
    assert sorted(epoch) == list(range(ROWS * SEQ_LEN))
    whole = scene.undisturbed(2, **SIZES)
    if name == "same ranks":
        assert_same_run(scene.out, whole)
    losses, expected = ([row["train/loss"] for row in results(out)] for out in (scene.out, whole))
    assert len(losses) == SIZES["steps"]
    assert losses == pytest.approx(expected, rel=1e-6)
