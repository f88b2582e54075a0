"""Commands and settings that have to end with code 2 and say why, before anything is done."""

from __future__ import annotations

import re

import pytest
from runs import load_recipe

from forgekit.cli import main
from forgekit.config import keys_of, load_config, name_of

pytestmark = pytest.mark.bad_input

COMMANDS = {
    "no such command": (["reports"], r"invalid choice: 'reports' (choose from "),
    "a script that is not there": (
        ["replay", "gone", "--step", "3", "--script", "gone.py"],
        "gone is no run directory. Name what a recipe's out= was.",
    ),
    "no such recipe": (["run", "pretrian"], "no recipe 'pretrian'; the nearest is 'pretrain'. "),
    "a copy that would not run": (
        ["cp", "minimal", "a.txt"],
        "a.txt is neither a .py file nor a folder that exists.",
    ),
    "a source that is not there": (
        ["prepare", "gone", "--out", "o"],
        "gone does not exist; name an existing file or folder.",
    ),
    "a file in the way": (
        ["prepare", "a.txt", "--out", "a.txt"],
        "a.txt is a file; name a directory that does not exist yet.",
    ),
    "a vocabulary that is too small": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "10"],
        "vocab_size 10 must be at least 257.",
    ),
    "a picture": (
        ["prepare", "a.png", "--out", "o"],
        "a.png is not UTF-8: byte 0x89 at position 0. Convert it (iconv -t UTF-8) or leave it out.",
    ),
    "all held out": (
        ["prepare", "a.txt", "--out", "o", "--held-out-every", "1"],
        "held_out_every 1 must be at least 2",
    ),
    "files beside a dataset": (
        ["prepare", "hf:a", "a.txt", "--out", "o"],
        "hf:a is given beside other sources. Prepare each into a folder of its own, and mix them",
    ),
    "a run that is not there": (
        ["replay", "gone"],
        "gone is no run directory. Name what a recipe's out= was.",
    ),
    "no recipe to verify": (
        ["verify", "gone.py", "mesh.tp=2"],
        "gone.py is not there; name a recipe's file, or one of `forgekit ls`.",
    ),
    "a folder as a recipe": (["diff", "."], ". is a folder; name a file that `forgekit cp` wrote."),
    "a recipe to verify that has no name": (
        ["verify", "pretrian"],
        "no recipe 'pretrian'; the nearest is 'pretrain'. ",
    ),
    "a recipe without a set-up": (
        ["verify", "minimal"],
        "minimal.py has no Config, setup; a recipe that this command can set up has Config",
    ),
    "an unknown dimension": (
        ["verify", "pretrain", "mesh.tq=2"],
        "mesh.tq: unknown key; the nearest is mesh.tp",
    ),
    "two dimensions without a size": (
        ["verify", "pretrain", "mesh.tp=-1"],
        "mesh: dp_shard and tp are both -1; only one can be what is left",
    ),
    "experts beyond the ranks": (
        ["verify", "pretrain", "mesh.ep=2"],
        "ep 2 does not divide dp_shard * cp = 1; it can be one of [1].",
    ),
    "a step before the first": (
        ["replay", ".", "--step", "0"],
        "--step 0: . has logged steps from 1 to 0.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be_ends_with_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.py").touch()
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert len(shown.err) < 900
    assert shown.err.replace("\n", "").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.txt", "empty.py"]


FILES = {
    "no TOML": (b"a = = 1", "is not valid TOML: Invalid value (at line 1, column 5)."),
    "a key given twice": (b"steps = 1\nsteps = 2\n", "is not valid TOML: Cannot overwrite a value"),
    "text for a number": (b'[optim]\nlr = "x"\n', 'optim.lr: expected float, read "x" (str).'),
    "a slip": (b"[model]\nlayer = 2\n", "model.layer: unknown key; the nearest is model.layers."),
    "a fraction": (b"steps = 1.5\n", "steps: expected int, read 1.5 (float)."),
    "a mark and a slip": (b"\xef\xbb\xbfstep = 1\n", "step: unknown key; the nearest is steps."),
    "a section given twice": (b"[optim]\n[optim]\n", "is not valid TOML: Cannot declare ('optim',"),
    "a section inside a number": (b"steps = 1\n[steps]\n", "is not valid TOML: Cannot"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_of_settings_that_cannot_be_ends_with_code_2(content, message, tmp_path, capsys):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, ["--config", str(tmp_path / "a.toml")])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown) < 700
    assert shown.replace("\n", "").isprintable()


SETTINGS = {
    "not a file": ("--config .", "--config: cannot read . (Is a directory)."),
    "no such file": ("--config gone.toml", "--config: cannot read gone.toml (No such file or dir"),
    "a negative number of steps": ("steps=-1", "steps: 'steps' must be >= 0: -1."),
    "a rate that is not a number": (
        "optim.lr=nan",
        "optim.lr: read nan, which is not a number; write one, or",
    ),
    "a negative rate": ("optim.lr=-1", "optim.lr: 'lr' must be >= 0: -1.0."),
    "rows of metrics never": ("log_every=0", "log_every: 'log_every' must be >= 1: 0."),
    "no rows in a step": ("global_batch_size=0", "'global_batch_size' must be >= 1: 0."),
    "growth for decay": ("optim.weight_decay=-0.1", "'weight_decay' must be >= 0: -0.1."),
    "patience of none": ("patience=0", "patience: 'patience' must be >= 1: 0."),
    "nothing to go on from": ("prompt=", "prompt: Length of 'prompt' must be >= 1: 0."),
    "a number for a folder": ("out=3", "out: expected Path, read 3 (int); quotes make it text"),
    "a word for a seed": ("seed=x", 'seed: expected int, read "x" (str).'),
    "text before a rate": ("optim.lr=1e-4x", 'optim.lr: expected float, read "1e-4x" (str).'),
    "a comma in a rate": ("optim.lr=0,1", 'optim.lr: expected float, read "0,1" (str).'),
    "a number for a switch": (
        "compile=0",
        "compile: expected bool, read 0 (int); write true or false.",
    ),
    "yes": ("compile=yes", 'compile: expected bool, read "yes" (str); write true or false.'),
    "a switch for a number": ("seed=true", "seed: expected int, read true (bool)."),
    "a list for a section": ("optim=[]", "optim: expected Optim, read [] (list)."),
    "ranks of nothing": ("mesh.pp=0", "mesh: pp is 0; a mesh dimension is at least 1, or -1 once."),
    "certain dropout": ("model.dropout=1.5", "model.dropout: 'dropout' must be < 1: 1.5."),
    "bits": ("precision=16", "precision: expected one of fp32, bf16, fp16, read 16 (int); the nea"),
}


@pytest.mark.parametrize(("line", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_of_a_recipe_that_cannot_be_ends_with_code_2(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, line.split(" "))
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown) < 700
    assert shown.replace("\n", "").isprintable()


MAY_BE_INFINITE = ("max_norm", "data.temperature")


def numbers_of(config):
    """Settings of each number that a recipe reads: below 0 and not finite."""
    for key in keys_of(config):
        kinds = {kind for kind in (int, float) if kind.__name__ in name_of(key.kind).split()}
        is_table = name_of(key.kind) == "dict[str, float]"
        if not kinds and not is_table:
            continue
        for value in ("-2", *(("nan", "inf") if float in kinds or is_table else ())):
            if value == "inf" and key.name in MAY_BE_INFINITE:
                continue
            name = f"{key.name}.mail" if is_table else key.name
            section, _, inner = name.rpartition("[].")
            given = f"{section}=[{{step=1,{inner}={value}}}]" if section else f"{name}={value}"
            yield given.replace("step=1,step", "step")


SCALED = [f"model.rope_scaling.{p}" for p in ("kind=yarn", "factor=2", "original_max_seq_len=64")]
"""What a scaled rotary embedding needs beside the setting that is tried."""


@pytest.mark.parametrize("recipe", ["pretrain", "curriculum", "pipeline", "long_context"])
def test_numbers_below_0_or_not_finite_end_with_code_2(recipe, capsys):
    config = load_recipe(recipe).Config
    settings = [*numbers_of(config)]
    assert len(settings) > 5
    for setting in settings:
        needed = [pair for pair in SCALED if setting.startswith("model.rope_scaling.")]
        with pytest.raises(SystemExit) as stop:
            load_config(config, [*needed, setting])
        assert stop.value.code == 2
        shown = capsys.readouterr().err
        rule = r"must be (>=?|<|above|finite|at least|an integer|positive)|not a number|is -2; a me"
        assert re.search(rule, shown), setting


def test_a_mark_at_the_start_of_a_file_of_settings_is_no_part_of_it(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfsteps = 7\n")
    config = load_config(load_recipe("pretrain").Config, ["--config", str(tmp_path / "a.toml")])
    assert config.steps == 7
