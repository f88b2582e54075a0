"""Averages of the weights: what they are, how they are saved, and how they stand in."""

from __future__ import annotations

import logging

import pytest
import torch
from optim.optimizers import assert_close, parameters_of, rows, small_model, square_loss

import forgekit as fk


def create(average=None, dtype=torch.float64, model=None):
    model = small_model(dtype) if model is None else model
    return fk.TrainState.create(model, fk.adamw(model), average=average)


def train(state, steps, start=0, bad=(), dtype=torch.float64):
    """The state, and the weights after each step."""
    step, weights = fk.make_step(square_loss, schedule=fk.constant(0.01)), []
    for index in range(start, start + steps):
        batch = rows(index, torch.nan if index in bad else 1.0, dtype)
        state, _ = step(state, [batch])
        weights.append(parameters_of(state.model))
    return state, weights


def test_an_ema_is_one():
    state = create(fk.EMA(0.75))
    expected = parameters_of(state.model)
    state, weights = train(state, 5, bad=(2,))
    for after in weights[:2] + weights[3:]:
        expected = {n: 0.75 * e + 0.25 * after[n] for n, e in expected.items()}
    assert_close(state.average.values, expected, 1e-15)
    assert int(state.average.count) == 4


@pytest.mark.parametrize(("start", "taken"), [(0, [0, 1, 3, 4]), (3, [3, 4]), (9, [4])])
def test_a_uniform_average_is_the_mean_of_what_follows_a_step(start, taken):
    """Before its first step it is the weights as they are; a skipped step does not count."""
    state, weights = train(create(fk.UniformAverage(start)), 5, bad=(2,))
    for name, value in state.average.values.items():
        mean = torch.stack([weights[number][name] for number in taken]).mean(0)
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-15)
    assert int(state.average.count) == (len(taken) if start < 9 else 0)


def test_the_average_of_bfloat16_weights_is_float32_and_moves():
    """Steps of 2**-12 of the weights: in bfloat16 it would stand still."""
    state = create(fk.EMA(0.999), torch.bfloat16)
    start = parameters_of(state.model)
    state, _ = train(state, 4, dtype=torch.bfloat16)
    for name, value in state.average.values.items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, start[name].float())
        assert (value.to(torch.bfloat16) == start[name]).double().mean() > 0.5


def test_the_average_stands_in_for_the_weights_and_leaves_them_as_they_were():
    state, _ = train(create(fk.EMA(0.5)), 3)
    before = parameters_of(state.model)
    own = small_model()
    own.load_state_dict(state.average.values)
    expected = fk.evaluate(create(model=own), [rows(9)], square_loss)["loss"]
    with fk.averaged(state) as same:
        assert same is state
        found = fk.evaluate(state, [rows(9)], square_loss)["loss"]
    assert found == expected != fk.evaluate(state, [rows(9)], square_loss)["loss"]
    with pytest.raises(KeyError, match="missing"), fk.averaged(state):
        raise KeyError("missing")
    assert_close(parameters_of(state.model), before)


MESSAGE = "has an average of the weights: that of a state restarts"
ALL = ("model", "optimizer", "fields")
LOADED = {
    "as it was": (fk.EMA(0.5), fk.EMA(0.5), ALL),
    "none was saved": (None, fk.EMA(0.5), ALL),
    "not loaded": (fk.EMA(0.5), fk.EMA(0.5), ("model",)),
    "none to load into": (fk.EMA(0.5), None, ALL),
}


@pytest.mark.parametrize("case", LOADED)
def test_an_average_is_loaded_or_starts_again_from_the_weights(case, tmp_path, caplog):
    before, rule, parts = LOADED[case]
    state, weights = train(create(before), 2)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    with caplog.at_level(logging.WARNING, "forgekit"):
        loaded = fk.checkpoint_load(create(rule), tmp_path, parts=parts)
    assert (MESSAGE in caplog.text) == ("none" in case)
    assert (loaded.average is None) == (rule is None)
    expected = state.average.values if case == "as it was" else weights[-1]
    assert_close(parameters_of(loaded.model) if rule is None else loaded.average.values, expected)
    assert rule is None or int(loaded.average.count) == (2 if case == "as it was" else 0)


def test_averages_of_other_parameters_are_refused(tmp_path):
    state, _ = train(create(fk.EMA(0.5)), 2)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    model = small_model()
    optimizer = fk.adamw(model)
    model[0].bias.requires_grad_(False)
    other = fk.TrainState.create(model, optimizer, average=fk.EMA(0.5))
    assert "0.bias" not in other.average.values  # only what is trained is averaged
    message = r"has averages of other parameters: only it has '0.bias'. Train what was trained"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(other, tmp_path)


def test_what_is_no_rule_and_a_state_without_an_average_are_refused():
    with pytest.raises(ValueError, match=r"'decay' must be < 1: 1\.0"):
        fk.EMA(1.0)
    with pytest.raises(TypeError, match=r"^average is a float; pass a rule"):
        create(0.999)
    message = r"^the state has no average, and AdamW has none either. Make it with TrainState.creat"
    with pytest.raises(ValueError, match=message), fk.averaged(create()):
        pass
