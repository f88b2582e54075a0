"""Recipes as plan, verify and replay set them up: all shipped ones, whatever they look like."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
from runs import arguments, signal_handlers_kept

import forgekit as fk
from forgekit.cli import main, recipes_folder
from forgekit.cli.recipe_setup import micro_batches

SMALL = [("pipeline", ["layers=2", "micro_batches=3"]), ("long_context", ["seq_len=64"])]


@pytest.mark.parametrize(("name", "small"), SMALL)
def test_a_step_of_a_generators_batches_is_replayed_bitwise(name, small, tmp_path):
    run = tmp_path / "run"
    given = [f"out={run}", "steps=4", "log_every=1", *small]
    with signal_handlers_kept():
        assert main(["run", name, *given]) == 0
        script = str(recipes_folder() / f"{name}.py")
        assert main(["replay", str(run), "--step", "3", "--script", script]) == 0
    found = json.loads((run / "replay_step_3.json").read_text())
    (row,) = (row for row in fk.metrics.read_metrics(run / "metrics.jsonl") if row["step"] == 3)
    assert found["loss"] == row["train/loss"]
    assert found["grad_norm"] == row["train/grad_norm"]


def test_a_record_may_say_itself_how_many_micro_batches_make_a_step():
    loader = fk.make_loader(range(8), batch_size=2)
    config = SimpleNamespace(global_batch_size=8)
    assert micro_batches(SimpleNamespace(loader=loader), config) == 4
    assert micro_batches(SimpleNamespace(loader=loader, micro_batches=3), config) == 3


HEAD = """import attrs, forgekit as fk, os, sys
import beside
@attrs.frozen(kw_only=True)
class Config:
    mesh: fk.MeshSpec = fk.MeshSpec()
def setup(config):
    {body}
"""


@pytest.mark.parametrize("visible", [None, "1"])
def test_a_plan_leaves_the_process_as_it_was(visible, tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("")
    body = "raise ValueError(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    (tmp_path / "recipe.py").write_text(HEAD.format(body=body))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    before = sys.path.copy()
    assert main(["plan", str(tmp_path / "recipe.py")]) == 1
    assert "ValueError: ''" in capsys.readouterr().err
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    assert sys.path == before


def test_a_recipe_that_exits_is_an_error(tmp_path, capsys):
    """Whatever its exit code: nothing was planned."""
    (tmp_path / "beside.py").write_text("")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(HEAD.format(body="sys.exit(0)"))
    assert main(["plan", str(recipe)]) == 1
    assert "recipe.py would end with SystemExit: 0" in capsys.readouterr().err
    recipe.write_text("import sys\nsys.exit(0)\n")
    for command in ("plan", "verify"):
        assert main([command, str(recipe)]) == 2
        assert "recipe.py called sys.exit(0) when it was imported." in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tokens, tmp_path_factory):
    """A run without a bound of its gradients, two steps long."""
    folder = tmp_path_factory.mktemp("run") / "run"
    given = arguments(out=folder, data__path=tokens, steps=2, max_norm=math.inf)
    assert main(["run", "pretrain", *given]) == 0
    return folder


def test_a_configuration_without_a_bound_is_strict_json_and_is_read_back(run, tmp_path, capsys):
    """Also by a copy whose annotations are texts."""
    config = json.loads((run / "config.json").read_text(), parse_constant=pytest.fail)
    assert config["max_norm"] == "inf"
    start, end, rest = (recipes_folder() / "pretrain.py").read_text().partition('"""\n')
    copy = tmp_path / "mine.py"
    copy.write_text(f"{start}{end}\nfrom __future__ import annotations\n{rest}")
    command = ["replay", str(run), "--step", "2", "--script", str(copy)]
    assert main(command) == 0, capsys.readouterr()


DAMAGED = {
    "bad steps in no encoding": ("bad_steps.jsonl", b"\xff\n{}\n", "line 1: "),
    "a list of settings": ("config.json", b"[1]", "does not fit .*: it contains a list"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_of_a_run_that_was_damaged_is_one_sentence(case, run, tmp_path, capsys):
    name, content, message = DAMAGED[case]
    for file in run.glob("*.json*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_bytes(content)
    script = str(recipes_folder() / "pretrain.py")
    assert main(["replay", str(tmp_path), "--step", "2", "--script", script]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown), shown
    assert shown.count("\n") == 1
