"""Optimizers whose state a checkpoint would not find are refused; those without any are not."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from lab import train
from pool import run_ranks
from saved import assert_same, everything, momentum
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

import forgekit as fk
from forgekit.state import Layout, set_layout


def build(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    return fk.TrainState.create(model, optimizer(model))


class Several(Optimizer):
    """The common wrapper: the groups of all, an empty state of its own."""

    def __init__(self, model):
        first, second = momentum(model[0].parameters()), AdamW(model[1].parameters(), lr=0.1)
        super().__init__(chain(first.param_groups, second.param_groups), {})
        self.optimizers = {"a": [first], "b": [second]}

    def step(self):
        for (optimizer,) in self.optimizers.values():
            optimizer.step()


class Sharing(Optimizer):
    """A wrapper of one, whose state it shares."""

    def __init__(self, model):
        inner = momentum(model.parameters())
        super().__init__(inner.param_groups, {})
        self.inner, self.state = inner, inner.state

    def step(self):
        self.inner.step()


class Elsewhere(Optimizer):
    """Keeps what it remembers where no checkpoint looks."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.memory = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.remember(parameter)
                    kept["momentum"] = 0.9 * kept.get("momentum", 0) + parameter.grad
                    parameter -= group["lr"] * kept["momentum"]

    def remember(self, parameter):
        return self.memory.setdefault(parameter, {})


class InState(Elsewhere):
    def remember(self, parameter):
        return self.state[parameter]


class Stateless(Elsewhere):
    stateless = True

    def remember(self, parameter):
        return {}


def chain_with(make):
    return lambda model: fk.chain_optimizers(
        momentum(model[0].parameters()), make(model[1].parameters())
    )


HOLDING = {
    "several": (Several, "^Several holds SGD in 'optimizers', whose state a checkp"),
    "a wrapper in a chain": (
        lambda model: fk.chain_optimizers(Several(model)),
        r"^Several holds SGD in .* with forgekit.chain_optimizers\(first, second\); a wrapper of",
    ),
}


@pytest.mark.parametrize(("optimizer", "message"), HOLDING.values(), ids=HOLDING)
def test_an_optimizer_that_holds_others_is_refused(tmp_path, optimizer, message):
    state = train(build(optimizer), 2)
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(state, tmp_path / "refused")
    assert not list(tmp_path.iterdir())
    other = train(build(lambda model: fk.adamw(model)), 3)
    fk.checkpoint_save(other, tmp_path, blocking=True)
    state = fk.checkpoint_load(state, tmp_path, parts=("model",))  # there it does not matter
    torch.testing.assert_close(state.model[0].weight, other.model[0].weight, rtol=0, atol=0)


LOST = {
    "its own": lambda model: Elsewhere(model.parameters()),
    "a member's": chain_with(Elsewhere),
}
MESSAGE = (
    r"^Elsewhere has no state after step 2; kept anywhere but in optimizer\.state\[parameter\] it "
    r"would be lost\. .* stateless = True in its class\.$"
)


@pytest.mark.parametrize("optimizer", LOST.values(), ids=LOST)
def test_an_optimizer_without_state_after_a_good_step_is_refused(tmp_path, optimizer):
    state = build(optimizer)
    fk.checkpoint_save(state, tmp_path / "0", blocking=True)
    state = fk.donate(state, step=2, skipped=torch.tensor(2))
    fk.checkpoint_save(state, tmp_path / "bad steps alone", blocking=True)
    state = train(fk.donate(state, step=0, skipped=torch.tensor(0)), 2)
    with pytest.raises(TypeError, match=MESSAGE):
        fk.checkpoint_save(state, tmp_path / "2", blocking=True)
    assert not (tmp_path / "2").exists()


PLAIN = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "declared": lambda model: Stateless(model.parameters()),
    "a declared member": chain_with(Stateless),
    "in its place": lambda model: InState(model.parameters()),
    "a wrapper of one": Sharing,
}


@pytest.mark.parametrize("optimizer", PLAIN.values(), ids=PLAIN)
def test_what_keeps_its_state_or_needs_none_resumes_bitwise(tmp_path, optimizer):
    fk.checkpoint_save(train(build(optimizer), 2), tmp_path, blocking=True)
    state = train(fk.checkpoint_load(build(optimizer), tmp_path), 2)
    assert_same(everything(state), everything(train(build(optimizer), 4)))


def _stage(rank, world, directory, kind):
    """Each rank holds a layer of its own; only the first one's has a gradient."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential()
    model.add_module(str(rank), nn.Linear(3, 3))
    fully_shard(model, mesh=mesh["dp"])
    set_layout(model, Layout())
    state = fk.TrainState.create(model, kind(model.parameters()), mesh=mesh)
    if rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state = fk.donate(state, step=2)
    if kind is Elsewhere:
        with pytest.raises(TypeError, match=MESSAGE):
            fk.checkpoint_save(state, directory)
    else:
        fk.checkpoint_save(state, directory).wait()


@pytest.mark.parametrize("kind", [InState, Elsewhere])
def test_ranks_agree_whether_there_is_any_state(tmp_path, kind):
    """One that holds parameters without a gradient needs none."""
    run_ranks(_stage, 2, tmp_path, kind)
    assert (tmp_path / "latest").exists() == (kind is InState)
