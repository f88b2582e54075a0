"""Commands, settings, files and losses that have to be refused, before anything is done."""

from __future__ import annotations

import math
import re

import pytest
import torch
from lab import SPEC, global_batch, logits_loss
from runs import load_recipe

import forgekit as fk
from forgekit.cli import main
from forgekit.config import keys_of, load_config, name_of

COMMANDS = {
    "gone is not a run directory": ["replay", "gone"],
    "gone.py is not there": ["verify", "gone.py", "mesh.tp=2"],
    ". is a folder": ["diff", "."],
    "minimal.py has no Config, setup": ["verify", "minimal"],
}


@pytest.mark.parametrize("message", COMMANDS)
def test_a_command_that_cannot_be_ends_with_code_2(message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[message]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert (shown.out, list(tmp_path.iterdir())) == ("", [])


MAY_BE_INFINITE = ("max_norm", "data.temperature")


def numbers_of(config):
    """Settings of each number that a recipe reads: below 0 and not finite."""
    names = {key for key, *_ in keys_of(config)}
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
            first = "step" if f"{section}[].step" in names else "start"
            given = f"{section}=[{{{first}=1,{inner}={value}}}]" if section else f"{name}={value}"
            yield given.replace(f"{first}=1,{first}=", f"{first}=")


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


@pytest.mark.parametrize("use", [fk.data.text_documents, fk.data.open_tokens])
def test_an_empty_path_is_not_the_current_folder(use):
    with pytest.raises(ValueError, match=r'is empty; pass a file or folder\. "\." is the curr'):
        use("")


LOSSES = {
    "does not depend on any trainable param": lambda total: fk.Loss(total.detach(), 1),
    "must be scalars .*; got shape .*. Sum": lambda total: fk.Loss(total, 1, {"a": torch.ones(3)}),
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_cannot_be_trained_is_refused(message):
    model = fk.Transformer(SPEC)
    state, (batch,) = fk.TrainState.create(model, fk.adamw(model)), global_batch(1)[0]

    def loss_fn(model, batch):
        return LOSSES[message](model(batch["input_ids"]).sum())

    with pytest.raises((TypeError, ValueError), match=message):
        fk.accumulate(state, [batch], loss_fn)
    with pytest.raises(TypeError, match=r"^a micro-batch must be a TensorDict .* Pass a list of"):
        fk.accumulate(state, [batch[0]], logits_loss)
    with pytest.raises(ValueError, match=r"^sync is 'lst'"):
        fk.accumulate(state, [batch], logits_loss, sync="lst")
    step = fk.make_step(logits_loss, schedule=lambda _: math.nan)
    with pytest.raises(ValueError, match=r"^the learning rate of step 0"):
        step(state, [batch])
