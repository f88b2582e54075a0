"""Optimizers whose state a checkpoint would not find are refused; those without any are not."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from lab import train
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW, Optimizer

import forgekit as fk
from forgekit.state import Layout, set_layout


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


class Several(Optimizer):
    """The common wrapper: the groups of all, an empty state of its own."""

    def __init__(self, model):
        first = SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        second = AdamW(model[1].parameters(), lr=0.1)
        super().__init__(chain(first.param_groups, second.param_groups), {})
        self.optimizers = [first, second]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


class ByName(Several):
    def __init__(self, model):
        super().__init__(model)
        self.optimizers = dict(zip("ab", self.optimizers, strict=True))

    def step(self):
        for optimizer in self.optimizers.values():
            optimizer.step()


class NoSubclass:
    """One that only looks like an optimizer."""

    def __init__(self, model):
        self._inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.param_groups, self.state = self._inner.param_groups, {}

    def step(self):
        self._inner.step()

    def zero_grad(self):
        self._inner.zero_grad()


class Sharing(Optimizer):
    """A wrapper of one, whose state it shares."""

    def __init__(self, model):
        inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
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


class OwnSGD(SGD):
    """A user's class that torch does not know."""


def chain_with(make):
    def build(model):
        first = SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return fk.chain_optimizers(first, make(model[1].parameters()))

    return build


def chained_wrapper(model):
    return fk.chain_optimizers(Several(model))


HOLDING = {
    "a list of optimizers": (Several, "^Several holds SGD in 'optimizers', whose state is not tha"),
    "a dict of optimizers": (ByName, "^ByName holds SGD in 'optimizers', whose state is not that"),
    "one, and no subclass": (NoSubclass, "^NoSubclass holds SGD in '_inner', whose state is not"),
    "a wrapper in a chain": (chained_wrapper, "^Several holds SGD in 'optimizers', whose state is"),
}


@pytest.mark.parametrize(("build", "message"), HOLDING.values(), ids=HOLDING)
def test_an_optimizer_that_holds_others_is_refused(tmp_path, build, message):
    model = build_model()
    state = train(fk.TrainState.create(model, build(model)), 2)
    remedy = r".* Join optimizers with forgekit.chain_optimizers\(first, second\); a wrapper of one"
    with pytest.raises(TypeError, match=message + remedy):
        fk.checkpoint_save(state, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_an_optimizer_holds_does_not_matter_where_only_the_model_is_loaded(tmp_path):
    model = build_model()
    saved = train(fk.TrainState.create(model, fk.adamw(model)), 2)
    fk.checkpoint_save(saved, tmp_path, blocking=True)
    other = build_model()
    state = fk.TrainState.create(other, Several(other))
    state = fk.checkpoint_load(state, tmp_path, parts=("model",))
    torch.testing.assert_close(state.model[0].weight, model[0].weight, rtol=0, atol=0)


LOST = {
    "its own": lambda model: Elsewhere(model.parameters()),
    "a member's": chain_with(Elsewhere),
}
MESSAGE = (
    r"^Elsewhere has no state after step 2\. Kept anywhere but in optimizer\.state\[parameter\] it "
    r"would be lost in a checkpoint: keep it there\. .* stateless = True in its class\.$"
)


@pytest.mark.parametrize("build", LOST.values(), ids=LOST)
def test_an_optimizer_without_state_after_a_step_is_refused(tmp_path, build):
    model = build_model()
    state = fk.TrainState.create(model, build(model))
    fk.checkpoint_save(state, tmp_path / "0", blocking=True)
    state = train(state, 2)
    with pytest.raises(TypeError, match=MESSAGE):
        fk.checkpoint_save(state, tmp_path / "2", blocking=True)
    assert not (tmp_path / "2").exists()


def test_steps_that_were_all_bad_leave_no_state(tmp_path):
    model = build_model()
    state = fk.TrainState.create(model, Elsewhere(model.parameters()))
    state = fk.donate(state, step=2, skipped=torch.tensor(2))
    assert fk.checkpoint_save(state, tmp_path).wait().name == "step_00000002"


PLAIN = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
    "a subclass of sgd": lambda model: OwnSGD(model.parameters(), lr=0.1),
    "declared": lambda model: Stateless(model.parameters()),
    "a declared member": chain_with(Stateless),
    "in its place": lambda model: InState(model.parameters()),
    "a member of a chain": chain_with(InState),
    "a wrapper of one": Sharing,
}


@pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN)
def test_what_keeps_its_state_or_needs_none_resumes_bitwise(tmp_path, build):
    model = build_model()
    straight = train(fk.TrainState.create(model, build(model)), 4)
    model = build_model()
    fk.checkpoint_save(train(fk.TrainState.create(model, build(model)), 2), tmp_path, blocking=True)
    fresh = build_model()
    state = fk.checkpoint_load(fk.TrainState.create(fresh, build(fresh)), tmp_path)
    state = train(state, 2)
    for found, expected in zip(fresh.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_parameters_that_were_never_used_need_no_state(tmp_path):
    model = build_model()
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[1](model[0](x))
    state = train(fk.TrainState.create(model, InState(model.parameters())), 2)
    assert fk.checkpoint_save(state, tmp_path).wait().name == "step_00000002"


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
    run_ranks(_stage, 2, tmp_path, kind)
    assert (tmp_path / "latest").exists() == (kind is InState)
