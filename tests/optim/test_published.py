"""Lion, schedule-free AdamW and chains are what was published; the two points of the second."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from lion_pytorch import Lion as TheirLion
from optim.optimizers import assert_close, draw, parameters_of, rows, small_model, square_loss
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


parts = fk.optim
EXACT = {"dtype": torch.float64}
DECAY, LR = 0.2, 0.03
CODE = {
    "SingleDeviceMuon": (
        "muon",
        {},
        (parts.momentum(), parts.orthogonal(adjust_lr="original", **EXACT), parts.decay(DECAY)),
    ),
    "NorMuon": (
        "pytorch_optimizer",
        {"use_muon": True, "update_scale": "match_rms", "eps": 0.0},
        (
            parts.momentum(),
            parts.orthogonal(**EXACT),
            parts.row_norm(eps=0.0),
            parts.decay(DECAY),
        ),
    ),
    "SOAP": (
        "pytorch_optimizer",
        {"betas": (0.8, 0.9), "eps": 0.0, "precondition_frequency": 3},
        (parts.soap(0.8, 0.9, eps=0.0, every=3), parts.decay(DECAY)),
    ),
    "Lamb": (
        "pytorch_optimizer",
        {"betas": (0.8, 0.9), "eps": 0.0, "weight_decouple": False, "adam_debias": True},
        (parts.adam(0.8, 0.9, eps=0.0), parts.decay(DECAY), parts.trust_ratio()),
    ),
}
"""By class of theirs: its module, its options, and our chain."""


class InFloat64:
    """Stands in for ``torch`` in SOAP's module: QR in float64, and bases are not sorted."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)

    def argsort(self, values, *, descending):
        return torch.arange(len(values))

    def flip(self, basis, dims):
        return basis


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(6, 4), (3, 7)])
@pytest.mark.parametrize("name", CODE)
def test_chains_are_the_code_of_others(name, shape, monkeypatch):
    """Muon by its author, the others as pytorch-optimizer has them; the differences are removed.

    - Theirs run Newton-Schulz in bfloat16 and SOAP's QR in float32; here both run in float64.
    - Theirs add epsilons elsewhere; all are 0, and Muon's is negligible for large gradients.
    - SOAP's first step only initialises its bases; with a gradient of zeros to the identity.
    - SOAP sorts its bases by eigenvalue before each QR; the sort is disabled.
    - SOAP decays after the update, so that its weights are ours times ``1 - lr * decay``.
    - LAMB corrects no bias; ours starts at a step at which the corrections are 1.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / ".venv" / "optimizers")
    module, options, chain = CODE[name]
    kind = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    ours, theirs = (nn.Parameter(draw(*shape)) for _ in range(2))
    optimizers = [
        fk.optimizer(nn.ParameterList([ours]), {"*": chain}, lr=LR),
        kind([{"params": [theirs], **options, "lr": LR, "weight_decay": DECAY}]),
    ]
    factor = 1.0
    if name == "Lamb":
        optimizers[0].state[ours]["step"] = torch.tensor(1e6, **EXACT)
    elif name == "NorMuon":
        iterate = importlib.import_module("pytorch_optimizer.optimizer.utils.matrix")
        iterate = iterate.zero_power_via_newton_schulz_5
        monkeypatch.setattr(iterate, "__defaults__", (*iterate.__defaults__[:-1], torch.float64))
    elif name == "SOAP":
        monkeypatch.setattr("pytorch_optimizer.optimizer.soap.torch", InFloat64())
        factor = 1 - LR * DECAY
        theirs.grad = torch.zeros(shape, **EXACT)
        optimizers[1].step()
    ours.data /= factor
    start = ours.detach().clone()
    for step in range(24):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = draw(*shape, seed=step) * 1e12
            optimizer.step()
        torch.testing.assert_close(ours.detach(), theirs.detach() / factor, rtol=0, atol=1e-12)
    assert (ours - start).abs().min() > 1e-3


@pytest.mark.parametrize("options", [{}, {"r": 1.5, "weight_lr_power": 1.0}])
def test_schedule_free_is_schedulefrees_at_both_points(options):
    model, other = small_model(), small_model()
    ours = ScheduleFree(groups_of(model), betas=(0.7, 0.9), **options)
    theirs = AdamWScheduleFree(groups_of(other), betas=(0.7, 0.9), **options)
    theirs.train()
    for start in (0, 4):
        train(model, ours, 4, start)
        train(other, theirs, 4, start)
        y = model[0].weight.detach().clone()
        for switch, point in (("train",) * 2, ("eval", "evaluate"), ("eval", "evaluate")):
            for optimizer in (ours, theirs):
                getattr(optimizer, switch)()  # the same once more moves nothing
            assert ours.point == point
            assert_equal(model, other, 1e-12)
        assert (model[0].weight - y).abs().max() > 1e-3
        ours.train()
        theirs.train()
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
