"""Lion and schedule-free AdamW are what their authors published; the two points of the latter."""

from __future__ import annotations

import math

import pytest
import torch
from lab import run_with_torchao
from lion_pytorch import Lion as TheirLion
from schedulefree import AdamWScheduleFree
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.optim import Lion, ScheduleFree


def build_model(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def train(model, optimizer, steps, start=0):
    """Rates that rise and fall, on ever new rows."""
    for number in range(start, start + steps):
        rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(number)).double()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (2 + math.sin(number))
        optimizer.step()


def assert_equal(model, other, bound):
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def test_lion_is_lion_pytorchs():
    model, other = build_model(), build_model()
    train(model, Lion(groups_of(model), betas=(0.8, 0.95)), 6)
    train(other, TheirLion(groups_of(other), betas=(0.8, 0.95)), 6)
    assert_equal(model, other, 1e-12)
    assert not torch.equal(model[0].weight, build_model()[0].weight)


@pytest.mark.parametrize("options", [{}, {"r": 1.5, "weight_lr_power": 1.0}])
def test_schedule_free_is_schedulefrees_at_both_points(options):
    model, other = build_model(), build_model()
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


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_at_the_evaluation_point_is_refused(steps):
    model = build_model()
    optimizer = fk.schedule_free(model)
    train(model, optimizer, steps)
    optimizer.eval()
    before = [p.detach().clone() for p in model.parameters()]
    message = "^ScheduleFree is asked for a step at the point 'evaluate', where gradients mean"
    with pytest.raises(RuntimeError, match=message):
        train(model, optimizer, 1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.train()
    train(model, optimizer, 1)


@pytest.mark.parametrize("point", ["train", "evaluate"])
def test_a_checkpoint_says_at_which_point_the_parameters_are(point, tmp_path):
    model = build_model()
    state = fk.TrainState.create(model, fk.schedule_free(model))
    train(model, state.optimizer, 3)
    if point == "evaluate":
        state.optimizer.eval()
    fk.checkpoint_save(fk.donate(state, step=3), tmp_path, blocking=True)
    other = build_model()
    loaded = fk.checkpoint_load(fk.TrainState.create(other, fk.schedule_free(other)), tmp_path)
    assert loaded.optimizer.point == point
    assert_equal(other, model, 0)
    if point == "evaluate":
        with pytest.raises(RuntimeError, match="step at the point 'evaluate'"):
            loaded.optimizer.step()
        loaded.optimizer.train()
    kept = other[0].weight.detach().clone()
    loaded.optimizer.eval()
    assert (other[0].weight - kept).abs().max() > 1e-3


def loss_fn(model, batch):
    error = model(batch["x"]).square()
    return fk.Loss(error.sum(), torch.tensor(error.numel()))


def test_a_schedule_free_run_is_evaluated_at_its_average_and_goes_on_bitwise():
    draw = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    batch = TensorDict({"x": draw}, [6])
    losses, weights = {}, []
    for evaluates in (True, False):
        model = build_model()
        matrices = [model[0].weight, model[2].weight]
        optimizer = fk.chain_optimizers(
            ScheduleFree(matrices), Lion([model[0].bias, model[2].bias])
        )
        state = fk.TrainState.create(model, optimizer)
        step = fk.make_step(loss_fn, schedule=fk.constant(0.02))
        for _ in range(3):
            state, _ = step(state, [batch])
            if evaluates:
                losses["train"] = fk.evaluate(state, [batch], loss_fn)["loss"].item()
                with fk.averaged(state):
                    losses["average"] = fk.evaluate(state, [batch], loss_fn)["loss"].item()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    optimizer.members[0].eval()
    expected = fk.evaluate(state, [batch], loss_fn)["loss"].item()
    assert losses["average"] == pytest.approx(expected, rel=1e-12)
    assert abs(losses["average"] - losses["train"]) > 1e-3


def test_no_average_can_be_computed_without_a_first_beta():
    with pytest.raises(ValueError, match=r"^betas\[0\] is 0; it must be above 0, or no average"):
        fk.schedule_free(build_model(), betas=(0.0, 0.9))


REFUSED = r"^Adam\w+ of torchao keeps its state in blocks that begin with each rank"
TORCHAO = """
import re, sys
import torch, forgekit as fk
import torchao.optim
for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"):
    model = torch.nn.Linear(64, 64)
    try:
        fk.TrainState.create(model, getattr(torchao.optim, name)(model.parameters()))
    except ValueError as error:
        assert re.match(sys.argv[1], str(error)), error
    else:
        raise AssertionError(name)
"""


@pytest.mark.oracle
def test_optimizers_of_torchao_are_refused():
    run_with_torchao(TORCHAO, REFUSED)


def test_an_optimizer_made_from_one_of_torchao_is_refused():
    """By the module that the class is from: torchao itself takes seconds to import."""
    theirs = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    own = type("AdamW8bit", (theirs,), {})
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=REFUSED):
        fk.TrainState.create(model, own(model.parameters()))
