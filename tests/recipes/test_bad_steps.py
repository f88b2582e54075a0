"""A recipe whose data break some steps: it goes back by itself, and its bad steps are replayed."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest
from runs import arguments, draw_nothing, load_recipe

import forgekit as fk
from forgekit.cli import main, recipes_folder

BROKEN, ROWS = 56, 16
STEPS = 14
ENDS = """
good_loss = loss_fn
BROKEN = {broken}


def loss_fn(model, batch):
    loss = good_loss(model, batch)
    is_broken = any(row in BROKEN for row in batch["input_ids"].tolist())
    return fk.Loss(loss.sum * float("inf"), loss.count) if is_broken else loss


if __name__ == "__main__":"""


def broken_rows(tokens):
    """Token ids of the rows that break a step: those of samples 56 to 71."""
    recipe = load_recipe("pretrain")
    dataset = fk.token_dataset(tokens, 16)
    loader = fk.make_loader(dataset, seed=recipe.Config().seed)
    rows = [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]
    chosen = [rows[row] for _, row in loader.locate(BROKEN, BROKEN + ROWS)]
    unique = [ids for ids in chosen if rows.count(ids) == 1]
    assert any(ids in unique for ids in chosen[:8])
    assert any(ids in unique for ids in chosen[8:])
    return unique


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    """Runs of a recipe that breaks at some rows, and of one that never reads them; the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    text = (recipes_folder() / "pretrain.py").read_text()
    end = ENDS.format(broken=broken_rows(tokens))
    (folder / "breaks.py").write_text(text.replace('\nif __name__ == "__main__":', end))
    end = "    dev = fk.held_out_loader("
    assert text.count(end) == 1
    seek = f"    loader.seek(state.samples, skip=[({BROKEN}, {ROWS})])\n"
    (folder / "knows.py").write_text(text.replace(end, seek + end))
    with mock.patch.object(fk, "wrap_up", draw_nothing):
        for name in ("breaks", "knows"):
            given = {"out": folder / name, "data__path": tokens, "steps": STEPS, "spikes": 8.0}
            given = arguments(bad_steps="roll_back", patience=2, **given)
            assert main(["run", name, *given], recipes=folder) == 0
    return folder


def test_it_ends_as_if_the_samples_had_never_been_there(runs):
    found, expected = (
        {row["step"]: row for row in fk.metrics.read_metrics(runs / name / "metrics.jsonl")}
        for name in ("breaks", "knows")
    )
    assert list(found) == list(range(1, STEPS + 1))
    for step, row in expected.items():
        assert found[step]["samples"] == row["samples"] == 8 * step
        assert found[step]["train/loss"] == row["train/loss"]
        assert found[step]["train/grad_norm"] == row["train/grad_norm"]
        assert found[step]["train/skipped"] == found[step]["train/spikes"] == 0
    manifest = json.loads((runs / "breaks/checkpoints/step_00000005/manifest.json").read_text())
    assert str([BROKEN, ROWS]) in str(manifest["fields"]["skips"])
    history = map(json.loads, (runs / "breaks" / "history.jsonl").read_text().splitlines())
    assert [(event["event"], event["step"], event.get("skips")) for event in history] == [
        ("started", 0, None),
        ("rolled_back", 5, [[BROKEN, ROWS]]),
        ("finished", STEPS, None),
    ]


def test_the_last_bad_step_is_replayed(runs, capsys):
    script = ["--script", str(runs / "breaks.py")]
    assert main(["replay", str(runs / "breaks"), *script]) == 0
    found = json.loads((runs / "breaks" / "replay_step_9.json").read_text())
    assert (found["step"], found["samples"]) == (9, [64, 72])
    assert found["loss"] is None
    assert None in found["losses"]
    assert found["first_bad_output"] is None
    assert found["highest_bad_gradient"] == "norm"
    assert found["targets"] == [16] * 8
    assert len(found["bad_parameters"]) == 20
    assert "replay_step_9.json" in capsys.readouterr().out


def test_code_that_a_run_directory_names_is_shown_and_not_run(runs, tmp_path, capsys):
    """A directory from somebody else may name any file, in a name that a terminal obeys too."""
    planted = tmp_path / "a \x1b[31m'b.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    record = {"step": 3, "skips": [], "script": str(planted)}
    (tmp_path / "bad_steps.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["replay", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert "replay runs a recipe's code: pass it with --script FILE (the run noted " in shown
    assert "/a \\x1b[31m'b.py)." in shown
    assert "\x1b" not in shown


REFUSED = {
    "no bad step": ([], "has no bad_steps.jsonl: the run has no bad steps. --step N replays"),
    "a step to come": (["--step", "15"], "--step 15: .*knows has logged steps from 1 to 14"),
    "no script": (["--step", "2", "--script", "/gone.py"], "/gone.py is not there"),
    "another recipe": (["--step", "2", "--script", "curriculum.py"], "does not fit .*unknown key"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_cannot_be_replayed_is_refused(case, runs, capsys, monkeypatch):
    monkeypatch.chdir(recipes_folder())
    arguments, message = REFUSED[case]
    assert main(["replay", str(runs / "knows"), *arguments]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert re.search(message, error), error
