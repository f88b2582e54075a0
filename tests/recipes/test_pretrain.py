"""The recipe in one process: what a run leaves, what it refuses, what a stop and a change do."""

from __future__ import annotations

import json
import math
import signal

import pytest
from covering import some_of
from runs import (
    arguments,
    assert_same_run,
    load_recipe,
    results,
    rows_of,
    run_here,
    saved_step,
    status_of,
)

import forgekit as fk
from forgekit.cli import main, recipes_folder
from forgekit.config import structure, to_dict

STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    """The run directory of one process that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    given = {"steps": STEPS, "optim__lr": 0.01, "model__dropout": 0.1}
    run_here("pretrain", arguments(out=out, data__path=tokens, **given))
    return out


def test_a_run_directory_holds_what_happened(undisturbed):
    saved = {path.name for path in (undisturbed / "checkpoints").iterdir()}
    assert saved == {f"step_{step:08d}" for step in (STEPS - 10, STEPS - 5, STEPS)} | {"latest"}
    assert (undisturbed / "checkpoints" / "latest").readlink().name == f"step_{STEPS:08d}"
    config = json.loads((undisturbed / "config.json").read_text())
    recipe = load_recipe("pretrain")
    assert to_dict(structure(recipe.Config, config)) == config
    assert (config["steps"], config["model"]["dropout"]) == (STEPS, 0.1)
    assert status_of(undisturbed)["status"] == "finished"


def test_held_out_text_is_measured_in_bits_per_byte(undisturbed, tokens):
    *others, last = results(undisturbed)
    assert not any("eval/heldout/loss" in row for row in others)
    held_out = fk.data.open_tokens(tokens / "heldout")
    assert last["eval/heldout/targets"] == held_out.tokens - 1
    bits = last["eval/heldout/loss"] * held_out.tokens / held_out.metadata["text_bytes"]
    assert last["eval/heldout/bits_per_byte"] == pytest.approx(bits / math.log(2), rel=1e-12)
    first = rows_of(undisturbed)[0]["train/loss"]
    assert last["eval/heldout/loss"] < 0.5 * first, "it has learned nothing"


def test_a_run_that_has_ended_well_stays_so_without_its_picture(tmp_path, tokens, capsys):
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "report.html").mkdir()
    run_here("pretrain", arguments(out=tmp_path, data__path=tokens, steps=1), is_drawn=True)
    shown = capsys.readouterr().err
    assert f"no loss curve: [Errno 21] Is a directory: '{tmp_path}" in shown
    assert f"{tmp_path / 'report.html'}" in shown
    assert status_of(tmp_path)["status"] == "finished"


LOOP = "            if must_roll_back(log(state, metrics)):\n"
EVALUATION = "fk.evaluate(state, held_out, "
STOPS = {
    "after the step": (LOOP, f"            if state.step == 1: fk.alarm()\n{LOOP}"),
    "in its midst": (EVALUATION, "fk.evaluate(state, map(fk.alarm, held_out), "),
}
"""What is put into a recipe that is stopped when the evaluation after step 4 is due."""


@pytest.mark.parametrize("moment", some_of(STOPS, "after the step"))
def test_an_evaluation_that_a_stop_cuts_short_is_made_up_for(moment, tmp_path, tokens, monkeypatch):
    def alarm(batch=None):
        signal.raise_signal(signal.SIGTERM)
        return batch

    monkeypatch.setattr(fk, "alarm", alarm, raising=False)
    settings = {"data__path": tokens, "steps": 8, "eval_every": 4, "save_every": 3}
    run_here("pretrain", arguments(out=tmp_path / "straight", **settings))
    text = (recipes_folder() / "pretrain.py").read_text()
    assert text.count(STOPS[moment][0]) == 1
    (tmp_path / "stops.py").write_text(text.replace(*STOPS[moment]))
    out = tmp_path / "run"
    run_here(tmp_path / "stops.py", arguments(out=out, **settings))
    assert (status_of(out)["status"], saved_step(out)) == ("stopped", 4)
    assert not any("eval/heldout/loss" in row for row in rows_of(out))

    run_here("pretrain", arguments(out=out, **settings))
    assert [row["step"] for row in rows_of(out) if "eval/heldout/loss" in row] == [4, 8]
    assert_same_run(out, tmp_path / "straight")


def test_what_a_resumed_run_does_differently_is_written_down(tmp_path, tokens, capsys):
    """The seed is one of the things that stay: the checkpoint has it."""
    out = tmp_path / "run"
    run_here("pretrain", arguments(out=out, data__path=tokens, steps=2, seed=3))
    capsys.readouterr()
    changed = {"steps": 4, "seed": 5, "optim__lr": 1e-3, "prompt": '"\\u001b[31m"'}
    run_here("pretrain", arguments(out=out, data__path=tokens, **changed))
    shown = capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert (config["seed"], config["steps"], config["optim"]["lr"]) == (3, 4, 1e-3)
    (record,) = map(json.loads, (out / "config_changes.jsonl").read_text().splitlines())
    assert (record["step"], record["samples"]) == (2, 16)
    assert record["changed"] == {
        "steps": [2, 4],
        "prompt": ["def ", "\x1b[31m"],
        "optim.lr": [None, 1e-3],
    }
    assert f"{out}: configuration changed: steps 2 -> 4, prompt" in shown
    assert "optim.lr None -> 0.001\n" in shown
    assert "\x1b" not in shown
    run_here("pretrain", arguments(out=out, data__path=tokens, **changed))
    assert len((out / "config_changes.jsonl").read_text().splitlines()) == 1


def test_a_run_of_no_steps_ends_well(tmp_path, tokens, capsys):
    run_here("pretrain", arguments(out=tmp_path, data__path=tokens, steps=0))
    assert "all 0 steps are done already" in capsys.readouterr().err
    assert status_of(tmp_path)["status"] == "finished"


def test_other_data_is_refused_and_nothing_is_lost(tmp_path, tokens, capsys):
    out = tmp_path / "run"
    given = {"data__path": tokens, "optim__warmup": 2}
    run_here("pretrain", arguments(out=out, steps=4, **given))
    metrics = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run_here("pretrain", arguments(out=out, steps=8, data__seq_len=8, **given))
    assert "was saved while training on other data" in capsys.readouterr().err
    assert status_of(out)["status"] == "failed"
    assert "on other data" in status_of(out)["reason"]
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert saved_step(out) == 4
    run_here("pretrain", arguments(out=out, steps=8, **given))
    assert [row["step"] for row in rows_of(out)] == list(range(1, 9))
    assert status_of(out)["status"] == "finished"


def test_a_run_whose_sizes_change_is_logged_replayed_and_planned(tokens, tmp_path, capsys):
    phases = "[{start=16,global_batch_size=4},{start=28,global_batch_size=8,seq_len=32}]"
    given = {"data__path": tokens, "model__max_seq_len": 32, "phases": phases, "save_every": 4}
    given = arguments(**given, out=tmp_path / "run", steps=7)
    run_here("pretrain", given)
    rows = rows_of(tmp_path / "run")
    assert [row["samples"] for row in rows] == [8, 16, 20, 24, 28, 36, 44]
    assert [row["train/targets"] for row in rows] == [128, 128, 64, 64, 64, 256, 256]
    # From step 4 on, through the change.
    script = ["--script", str(recipes_folder() / "pretrain.py")]
    assert main(["replay", str(tmp_path / "run"), "--step", "7", *script]) == 0
    found = json.loads((tmp_path / "run" / "replay_step_7.json").read_text())
    assert (found["samples"], found["loss"]) == ([36, 44], rows[-1]["train/loss"])
    assert (found["grad_norm"], found["bad_parameters"]) == (rows[-1]["train/grad_norm"], [])
    assert (found["first_bad_output"], found["highest_bad_gradient"]) == (None, None)
    capsys.readouterr()
    assert main(["plan", "pretrain", *given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["micro_batches"], plan["targets_per_step"]) == (4, 256)
