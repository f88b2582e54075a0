"""Commands and settings that have to end with code 2 and say why, before anything is done."""

from __future__ import annotations

import re

import pytest
from runs import load_recipe

from forgekit.cli import main
from forgekit.config import keys_of, load_config, name_of

COMMANDS = {
    "no such command": (["reports"], r"invalid choice: 'reports' (choose from "),
    "a run that is not there": (
        ["replay", "gone"],
        "gone is no run directory. Name what a recipe's out= was.",
    ),
    "no recipe to verify": (
        ["verify", "gone.py", "mesh.tp=2"],
        "gone.py is not there; name a recipe's file, or one of `forgekit ls`.",
    ),
    "a folder as a recipe": (["diff", "."], ". is a folder; name a file that `forgekit cp` wrote."),
    "a recipe without a set-up": (
        ["verify", "minimal"],
        "minimal.py has no Config, setup; a recipe that this command can set up has Config",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be_ends_with_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("to be or not to be")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    assert shown.err.replace("\n", "").isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


MAY_BE_INFINITE = ("max_norm", "data.temperature")


def numbers_of(config):
    """Settings of each number that a recipe reads: below 0 and not finite."""
    for key, of, *_ in keys_of(config):
        kinds = {kind for kind in (int, float) if kind.__name__ in name_of(of).split()}
        is_table = name_of(of) == "dict[str, float]"
        if not kinds and not is_table:
            continue
        for value in ("-2", *(("nan", "inf") if float in kinds or is_table else ())):
            if value == "inf" and key in MAY_BE_INFINITE:
                continue
            name = f"{key}.mail" if is_table else key
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
        rule = r"must be (>=?|<|above|finite|at least|an integer|positive)|read NaN|is -2; a me"
        assert re.search(rule, shown), setting
