"""Lion and schedule-free AdamW are what their authors published; the two points of the latter."""

from __future__ import annotations

import math

import pytest
import torch
from lion_pytorch import Lion as TheirLion
from optim.optimizers import assert_close, parameters_of, rows, small_model, square_loss
from schedulefree import AdamWScheduleFree
from torch import nn

import forgekit as fk
from forgekit.optim import ScheduleFree


def train(model, optimizer, steps, start=0):
    """Rates that rise and fall, on ever new rows."""
    for number in range(start, start + steps):
        optimizer.zero_grad()
        model(rows(number)["x"]).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (2 + math.sin(number))
        optimizer.step()


def assert_equal(model, other, bound):
    assert_close(parameters_of(model), parameters_of(other), bound)


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def stochastic(model):
    """Beside parameters in bfloat16; those in float64 are not rounded."""
    model.append(nn.Linear(3, 3).bfloat16())
    optimizer = fk.adamw(model, stochastic_rounding=True, weight_decay=0.3)
    del model[-1]
    return optimizer


def rms(directions, state, at):
    """A transform as a user adds one: root mean squares."""
    squares = [
        0.9 * s + 0.1 * d.square() for s, d in zip(state["squares"], directions, strict=True)
    ]
    pairs = zip(directions, squares, strict=True)
    return [d / (s.sqrt() + 1e-3) for d, s in pairs], {"squares": squares}


RMS = fk.optim.transform(rms, state={"squares": torch.zeros_like})


PAIRS = {
    "lion": (
        lambda m: fk.lion(m, betas=(0.8, 0.95), weight_decay=0.3),
        lambda m: TheirLion(groups_of(m), betas=(0.8, 0.95)),
    ),
    "adamw before it rounds": (stochastic, lambda m: fk.adamw(m, weight_decay=0.3)),
    "one of a user's own": (
        lambda m: fk.optimizer(m, {"*": RMS}),
        lambda m: torch.optim.RMSprop(m.parameters(), alpha=0.9, eps=1e-3),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_published_is_computed(name):
    model, other = small_model(), small_model()
    for each, make in zip((model, other), PAIRS[name], strict=True):
        train(each, make(each), 6)
    assert_equal(model, other, 1e-12)
    assert not torch.equal(model[0].weight, small_model()[0].weight)


@pytest.mark.parametrize("options", [{}, {"r": 1.5, "weight_lr_power": 1.0}])
def test_schedule_free_is_schedulefrees_at_both_points(options):
    model, other = small_model(), small_model()
    ours = ScheduleFree(groups_of(model), betas=(0.7, 0.9), **options)
    theirs = AdamWScheduleFree(groups_of(other), betas=(0.7, 0.9), **options)
    theirs.train()
    for start in (0, 4):
        train(model, ours, 4, start)
        train(other, theirs, 4, start)
        assert_equal(model, other, 1e-12)
        y = model[0].weight.detach().clone()
        ours.eval()
        theirs.eval()
        assert ours.point == "evaluate"
        assert_equal(model, other, 1e-12)
        assert (model[0].weight - y).abs().max() > 1e-3
        ours.eval()  # once more moves nothing
        assert_equal(model, other, 1e-12)
        ours.train()
        theirs.train()
        assert ours.point == "train"
        assert_equal(model, other, 1e-12)


@pytest.mark.parametrize("point", ["train", "evaluate"])
def test_a_checkpoint_says_at_which_point_the_parameters_are(point, tmp_path):
    """At the evaluation point a step is refused and moves nothing."""
    model = small_model()
    state = fk.TrainState.create(model, fk.schedule_free(model))
    train(model, state.optimizer, 3)
    if point == "evaluate":
        state.optimizer.eval()
    fk.checkpoint_save(fk.donate(state, step=3), tmp_path, blocking=True)
    other = small_model()
    optimizer = fk.schedule_free(other)
    fk.checkpoint_load(fk.TrainState.create(other, optimizer), tmp_path)
    assert optimizer.point == point
    if point == "evaluate":
        message = "^ScheduleFree's parameters are at the point 'evaluate', where gradients are"
        with pytest.raises(RuntimeError, match=message):
            train(other, optimizer, 1)
        assert_equal(other, model, 0)
        optimizer.train()
    kept = other[0].weight.detach().clone()
    optimizer.eval()
    assert (other[0].weight - kept).abs().max() > 1e-3


def test_a_schedule_free_run_is_evaluated_at_its_average_and_goes_on_bitwise():
    weights = []
    for evaluates in (True, False):
        model = small_model()
        matrices, biases = (group["params"] for group in groups_of(model))
        optimizer = fk.chain_optimizers(ScheduleFree(matrices), torch.optim.SGD(biases))
        state = fk.TrainState.create(model, optimizer)
        step = fk.make_step(square_loss, schedule=fk.constant(0.02))
        for number in range(3):
            state, _ = step(state, [rows(number)])
            if evaluates:
                with fk.averaged(state):
                    average = [p.detach().clone() for p in model.parameters()]
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))
    optimizer.members[0].eval()
    assert all(map(torch.equal, average, model.parameters()))
    assert not torch.equal(average[0], weights[0][0])


def test_an_optimizer_made_from_one_of_torchao_is_refused():
    """By the module that the class is from: torchao itself takes seconds to import."""
    theirs = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    own = type("AdamW8bit", (theirs,), {})
    model = nn.Linear(2, 2)
    message = r"^AdamW8bit of torchao keeps its state in blocks that begin with each rank"
    with pytest.raises(ValueError, match=message):
        fk.TrainState.create(model, own(model.parameters()))
