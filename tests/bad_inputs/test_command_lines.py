"""Commands and settings that have to end with code 2 and say why, before anything is done."""

from __future__ import annotations

import pytest
from runs import load_recipe

from forgekit.cli import main
from forgekit.config import load_config

pytestmark = pytest.mark.bad_input

COMMANDS = {
    "no such command": (["report"], r"invalid choice: 'report' (choose from "),
    "no recipe named": (["cp"], "the following arguments are required: NAME"),
    "too much": (["ls", "x"], "unrecognized arguments: x"),
    "no such recipe": (["run", "pretrian"], "no recipe 'pretrian'; the nearest is 'pretrain'. "),
    "a copy that would not run": (
        ["cp", "minimal", "a.txt"],
        "a.txt is neither a .py file nor a folder that exists.",
    ),
    "a source that is not there": (
        ["prepare", "gone", "--out", "o"],
        "gone does not exist; name an existing file or folder.",
    ),
    "nowhere to go": (["prepare", "a.txt"], "the following arguments are required: --out"),
    "a file in the way": (
        ["prepare", "a.txt", "--out", "a.txt"],
        "a.txt is a file; name a directory that does not exist yet.",
    ),
    "a vocabulary of letters": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "x"],
        "argument --vocab: invalid int value: 'x'",
    ),
    "a vocabulary that is too small": (
        ["prepare", "a.txt", "--out", "o", "--vocab", "10"],
        "vocab_size 10 must be at least 257: 256 bytes and <|endoftext|>.",
    ),
    "a picture": (
        ["prepare", "a.png", "--out", "o"],
        "a.png is not UTF-8: byte 0x89 at position 0. Convert it (iconv -t UTF-8) or leave it out.",
    ),
    "all held out": (
        ["prepare", "a.txt", "--out", "o", "--held-out-every", "1"],
        "held_out_every 1 must be at least 2, to leave something.",
    ),
    "a run that is not there": (
        ["replay", "gone"],
        "gone has no bad_steps.jsonl, so no step had to be left out. --step N looks at another one",
    ),
    "a step before the first": (
        ["replay", "gone", "--step", "0"],
        "--step 0: steps are counted from 1, as in metrics.jsonl.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be_ends_with_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.txt"]


FILES = {
    "no TOML": (b"a = = 1", "is not valid TOML: Invalid value (at line 1, column 5)."),
    "JSON": (b'{"steps": 1}', "is not valid TOML: Invalid statement (at line 1, column 1)."),
    "bytes": (b"\xff\xfe\x00", "is not valid TOML: 'utf-8' codec can't decode byte 0xff"),
    "a key given twice": (b"steps = 1\nsteps = 2\n", "is not valid TOML: Cannot overwrite a value"),
    "half a file": (b"[optim]\nlr = ", "is not valid TOML: Invalid value"),
    "text for a number": (b'[optim]\nlr = "x"\n', 'optim.lr: expected float, read "x" (str).'),
    "a slip": (b"[model]\nlayer = 2\n", "model.layer: unknown key; the nearest is model.layers."),
    "a fraction": (b"steps = 1.5\n", "steps: expected int, read 1.5 (float)."),
    "a date": (b"steps = 2020-01-01\n", "steps: expected int, read "),
    "a list for a section": (b"mesh = [1]\n", "mesh: expected MeshSpec, read [1] (list)."),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_file_of_settings_that_cannot_be_ends_with_code_2(content, message, tmp_path, capsys):
    (tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, ["--config", str(tmp_path / "a.toml")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


SETTINGS = {
    "not a file": ("--config .", "--config: cannot read . (Is a directory)."),
    "no such file": ("--config gone.toml", "--config: cannot read gone.toml (No such file or dir"),
    "a negative number of steps": ("steps=-1", "steps: 'steps' must be >= 0: -1."),
    "a rate that is not a number": ("optim.lr=nan", "optim.lr: 'lr' must be >= 0: nan."),
    "a negative rate": ("optim.lr=-1", "optim.lr: 'lr' must be >= 0: -1.0."),
    "nothing kept": ("keep=-1", "keep: 'keep' must be >= 1: -1."),
    "a number for a folder": ("out=3", "out: expected Path, read 3 (int); quotes make it text"),
    "a word for a seed": ("seed=x", 'seed: expected int, read "x" (str).'),
    "half a rank": ("mesh.tp=1.5", "mesh.tp: expected int, read 1.5 (float)."),
    "ranks of nothing": ("mesh.pp=0", "mesh: pp is 0; a mesh dimension is at least 1, or -1 once."),
    "no layers": ("model.layers=0", "model: layers is 0; it must be at least 1."),
    "certain dropout": ("model.dropout=1.5", "model: dropout 1.5 must be at least 0 and below 1."),
    "bits": ("precision=16", "precision: expected one of fp32, bf16, fp16, read 16 (int); the nea"),
    "recomputing all": (
        "activation_checkpoint=all",
        "activation_checkpoint: expected one of none, full, selective, budget, read",
    ),
    "a schedule that is none": (
        "pipeline_schedule=x",
        "pipeline_schedule: expected one of gpipe, 1f1b, interleaved_1f1b, ",
    ),
    "a way to share that is none": (
        "context_parallel=star",
        'context_parallel: expected one of ring, ulysses, both, read "star" (str).',
    ),
}


@pytest.mark.parametrize(("line", "message"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_of_a_recipe_that_cannot_be_ends_with_code_2(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(load_recipe("pretrain").Config, line.split(" "))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
