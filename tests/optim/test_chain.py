"""Several optimizers as one: what it computes, keeps and refuses."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from unittest.mock import Mock

import pytest
import torch
from lab import Watch, alone
from optim.optimizers import (
    assert_close,
    entries_of,
    parameters_of,
    rows,
    small_model,
    square_loss,
)
from tensordict import TensorDict
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon

import forgekit as fk
from forgekit.ranks import CheckpointError
from forgekit.steps.update import skips_on_device


def split(model):
    """Matrices and biases."""
    return [[p for p in model.parameters() if p.ndim == n] for n in (2, 1)]


PAIRS = {
    "momentum and adamw": (
        lambda p: SGD([{"params": p, "lr_scale": 3.0}], momentum=0.9, nesterov=True),
        lambda p: AdamW(p, betas=(0.8, 0.9), weight_decay=0.3, fused=True),
    ),
    "muon and adamw": (
        lambda p: Muon([{"params": p, "lr_scale": 20.0}], weight_decay=0.2),
        lambda p: AdamW(p, eps=1e-3, fused=True),
    ),
    "two fused": (
        lambda p: Adam([{"params": p, "lr_scale": 0.5}], betas=(0.7, 0.8), fused=True),
        lambda p: AdamW(p, weight_decay=0.3, fused=True),
    ),
    "fused momentum": (
        lambda p: SGD([{"params": p, "lr_scale": 0.5}], momentum=0.8, fused=True),
        lambda p: AdamW(p, fused=True),
    ),
}


def members_of(model, pair):
    return [make(p) for make, p in zip(PAIRS[pair], split(model), strict=True)]


def chained(model, pair):
    return fk.chain_optimizers(*members_of(model, pair))


def create(pair, dtype=torch.float64):
    return alone(small_model(dtype), partial(chained, pair=pair))


def schedule(step):
    return 0.01 * (step + 1)


def train(state, steps, start=0):
    step = fk.make_step(square_loss, schedule=schedule, max_norm=0.5)
    for index in range(start, start + steps):
        state, _ = step(state, [rows(index)])
    return state


def plain_training(pair, steps):
    """What torch computes alone: both optimizers step after one backward of the mean."""
    model = small_model()
    optimizers = members_of(model, pair)
    for index in range(steps):
        batch = rows(index)
        model.zero_grad()
        (model(batch["x"]) - batch["y"]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = schedule(index) * group.get("lr_scale", 1.0)
            optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("pair", PAIRS)
def test_each_member_steps_its_parameters_with_its_own_settings(pair):
    model = train(create(pair), 4).model
    # Muon orthogonalises in bfloat16, so that the last bit of a gradient may turn into 2**-8.
    bound = 2e-3 if "muon" in pair else 1e-12
    assert_close(parameters_of(model), plain_training(pair, 4), bound)
    for before, after in zip(small_model().parameters(), model.parameters(), strict=True):
        assert (before - after).abs().max() > 0.01


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_chain_survives_what_torch_does_to_optimizers(way):
    pair = "muon and adamw"
    straight, state = train(create(pair), 4), train(create(pair), 2)
    other, optimizer = copy.deepcopy((state.model, state.optimizer))
    if way == "state_dict":
        optimizer = chained(other, pair)
        optimizer.load_state_dict(state.optimizer.state_dict())
    copied = fk.TrainState.create(other, optimizer)
    copied = train(fk.donate(copied, step=2), 2, start=2)
    assert_close(parameters_of(other), parameters_of(straight.model))
    assert_close(entries_of(other, optimizer), entries_of(straight.model, straight.optimizer))
    assert all(m.state is optimizer.state for m in optimizer.members)
    here = [group for member in optimizer.members for group in member.param_groups]
    assert all(own is group for own, group in zip(here, optimizer.param_groups, strict=True))


def test_a_chain_with_another_split_does_not_load(tmp_path):
    """Momentum of one optimizer is none of another's."""
    state = train(create("muon and adamw"), 2)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    other = small_model()
    (muon, adamw), (matrices, biases) = PAIRS["muon and adamw"], split(other)
    moved = fk.chain_optimizers(muon(matrices[:1]), adamw([*matrices[1:], *biases]))
    message = "is of another optimizer: '2.weight' is Muon there and AdamW here"
    with pytest.raises(CheckpointError, match=message):
        fk.checkpoint_load(fk.TrainState.create(other, moved), tmp_path)


@pytest.mark.parametrize("pair", ["two fused", "fused momentum", "momentum and adamw"])
def test_a_step_reads_the_host_only_where_a_member_cannot_skip_on_the_device(pair):
    """Nor does momentum's first step, which would leave its memory unwritten."""
    state = create(pair, torch.float32)
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert skips_on_device(state.optimizer) == (pair == "two fused")
    step, can_skip = fk.make_step(square_loss, schedule=schedule), pair != "momentum and adamw"
    batch = rows(0).float()
    state, _ = step(state, [batch])
    with Watch() as mode:
        state, _ = step(state, [batch])
    assert (not mode.host_reads) == skips_on_device(state.optimizer) == can_skip
    assert all(vars(member).get("found_inf") is None for member in state.optimizer.members)


def test_a_chain_of_a_chain_is_one_chain_and_keeps_the_state_of_its_members():
    model = small_model()
    first, second = split(model)
    members = [SGD([first[0]]), SGD([first[1]], momentum=0.9), AdamW(second)]
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    for member in members:
        member.step()
    kept = dict(chain.from_iterable(entries_of(model, member).items() for member in members))
    outer = fk.chain_optimizers(fk.chain_optimizers(*members[:2]), members[2])
    assert list(outer.members) == members
    assert_close(entries_of(model, outer), kept)


def test_a_closure_is_called_once_and_a_chain_takes_no_further_group():
    optimizer, closure = create("two fused").optimizer, Mock(return_value=0.5)
    assert optimizer.step(closure) == 0.5
    closure.assert_called_once()
    with pytest.raises(TypeError, match=r"^no member of the chain would step this parameter"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_state_takes_one_optimizer():
    model = small_model()
    message = "^optimizer is a .*; a state has one .* forgekit.chain_optimizers"
    with pytest.raises(TypeError, match=message):
        fk.TrainState.create(model, members_of(model, "two fused"))


# Rates that were given


class Own(torch.optim.SGD):
    """An optimizer whose rate has another name."""

    def __init__(self, params, rate=0.0):
        super().__init__(params, lr=rate)


GIVEN = {
    "a chain": lambda m: fk.chain_optimizers(Muon([m.weight], lr=1e-2), AdamW([m.bias], lr=3e-4)),
    "a group": lambda m: Adam([{"params": [m.weight], "lr": 1e-2}, {"params": [m.bias]}]),
    "a tensor": lambda m: AdamW(m.parameters(), lr=torch.tensor(1e-2)),
    "another name": lambda m: Own(m.parameters(), 1e-2),
}
"""Optimizers with rates that a schedule drops."""


@pytest.mark.parametrize("name", GIVEN)
def test_a_rate_that_the_schedule_never_has_is_refused_before_anything_moves(name):
    state = alone(nn.Linear(2, 2), GIVEN[name])
    schedule = fk.warmup_cosine(3e-4, warmup=3, total=9)
    before = state.model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"was given lr=0\.01, .* never has .*begins with 0\.0001"):
        one_step(state, schedule)
    assert torch.equal(state.model.weight, before)


def test_defaults_rates_of_the_schedule_and_scaled_ones_are_taken():
    """The peak comes after the first step; a resumed run has whatever rate it had."""
    for make in (lambda m: Own(m.parameters()), fk.lion, fk.schedule_free):
        assert one_step(alone(nn.Linear(2, 2), make), fk.constant(0.1)).step == 1
    model = nn.Linear(2, 2)
    matrices = torch.optim.Muon([{"params": [model.weight], "lr_scale": 20.0}], lr=6e-3)
    chain = fk.chain_optimizers(matrices, torch.optim.AdamW([model.bias], lr=3e-4))
    state = fk.TrainState.create(model, chain)
    state = one_step(state, fk.warmup_cosine(3e-4, warmup=3, total=9))
    rates = [group["lr"] for group in chain.param_groups]
    assert rates == pytest.approx([2e-3, 1e-4])
    assert one_step(state, fk.constant(7.0)).step == 2


def one_step(state, schedule):
    def loss_fn(model, batch):
        return fk.Loss(model(batch["x"]).square().sum(), 2)

    step = fk.make_step(loss_fn, schedule=schedule)
    return step(state, [TensorDict({"x": torch.ones(2, 2)}, [2])])[0]
