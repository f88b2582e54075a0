"""What chains of transforms compute, what they lower to, and what is refused."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lab import Watch, alone
from optim.optimizers import (
    CENTER,
    OWN,
    assert_close,
    build,
    draw,
    parameters_of,
    rows,
    small_model,
    square_loss,
    step_with,
)
from pool import run_again
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forgekit as fk
from forgekit.ranks import CheckpointError

parts = fk.optim
EXACT = {"dtype": torch.float64}
LR, DECAY = 0.03, 0.2


class Plain:
    """Formulas of the papers as loops over one matrix, in float64."""

    def __init__(self, weight):
        self.w, self.t, self.e = weight.clone(), 0, {}

    def mean(self, name, value, rate):
        self.e[name] = rate * self.e.get(name, torch.zeros_like(value)) + (1 - rate) * value
        return self.e[name]

    def orthogonal(self, x):
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    def normuon(self, g):
        m = self.mean("m", g, 0.95)
        u = self.orthogonal(0.05 * g + 0.95 * m)
        u = u / (self.mean("v", u.square().mean(1, keepdim=True), 0.9).sqrt() + 1e-8)
        u = u * 0.2 * math.sqrt(u.numel()) / u.norm()
        return u + DECAY * self.w * ((u * self.w) > 0)

    def soap(self, g):
        o, i = g.shape
        p, q = (self.e.setdefault(n, torch.eye(k).double()) for n, k in (("p", o), ("q", i)))
        left, right = self.mean("l", g @ g.T, 0.9), self.mean("r", g.T @ g, 0.9)
        m, v = self.mean("m", g, 0.8), self.mean("v", (p.T @ g @ q) ** 2, 0.9)
        x = (p.T @ m @ q / (1 - 0.8**self.t)) / ((v / (1 - 0.9**self.t)).sqrt() + 1e-8)
        if self.t % 3 == 0:
            self.e["p"], self.e["q"] = (torch.linalg.qr(a)[0] for a in (left @ p, right @ q))
        return p @ x @ q.T + DECAY * self.w

    def adam(self, g):
        m, v = self.mean("m", g, 0.9), self.mean("v", g * g, 0.95)
        return m / (1 - 0.9**self.t) / ((v / (1 - 0.95**self.t)).sqrt() + 1e-8)

    def lamb(self, g):
        u = self.adam(g) + DECAY * self.w
        return u * self.w.norm() / u.norm()

    def cautious(self, g):
        u = self.adam(g)
        mask = (u * g > 0).double()
        u = (u * mask / mask.mean()).clamp(-0.7, 0.7)
        return u * min(1.0, 2.0 / u.norm())

    def warmed(self, g):
        b = 0.5 + 0.3 * min(1.0, self.t / 4)
        self.e["m"] = b * self.e.get("m", 0) + (1 - b) * g
        return (1 - b) * g + b * self.e["m"]

    def step(self, kind, g):
        self.t += 1
        self.w = self.w - LR * getattr(self, kind)(g)


CHAINS = {
    "normuon": (
        parts.momentum(0.95),
        parts.orthogonal(**EXACT),
        parts.row_norm(0.9),
        parts.cautious_decay(DECAY),
    ),
    "soap": (parts.soap(0.8, 0.9, every=3), parts.decay(DECAY)),
    "lamb": (parts.adam(), parts.decay(DECAY), parts.trust_ratio()),
    "cautious": (parts.adam(), parts.cautious_mask(), parts.clip_value(0.7), parts.clip_norm(2.0)),
    "warmed": (parts.momentum(0.8, warmup=4, start=0.5),),
}


@pytest.mark.parametrize("shape", [(6, 4), (3, 7)])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_the_loop_of_its_paper(name, shape):
    model = nn.Module()
    model.stack = nn.Parameter(torch.stack([draw(*shape, seed=n) for n in (1, 2)]))
    model.weight = nn.Parameter(draw(*shape, seed=3))
    # A number of a whole parameter is one of the whole stack.
    is_summed = name in ("lamb", "cautious")
    if is_summed:
        del model.stack
    optimizer = fk.optimizer(model, {"*": CHAINS[name]}, lr=LR)
    plain = [Plain(w) for p in model.parameters() for w in p.detach().view(-1, *shape)]
    for step in range(7):
        gradients = [draw(*shape, seed=10 * step + n) for n in range(len(plain))]
        for one, gradient in zip(plain, gradients, strict=True):
            one.step(name, gradient)
        given = torch.stack(gradients).split([1] if is_summed else [2, 1])
        for p, gradient in zip(model.parameters(), given, strict=True):
            p.grad = gradient.view_as(p)
        optimizer.step()
    found = torch.cat([p.detach().view(-1, *shape) for p in model.parameters()])
    torch.testing.assert_close(found, torch.stack([one.w for one in plain]), rtol=0, atol=1e-12)


def test_factored_moments_are_torchs_adafactor():
    """Its rate is relative to the weights unless their mean square is below ``eps[1]``."""
    models = [nn.ParameterList([draw(6, 4, seed=9)]) for _ in range(2)]
    ours = fk.optimizer(models[0], {"*": parts.adafactor()}, lr=LR)
    theirs = torch.optim.Adafactor(models[1].parameters(), lr=LR, eps=(1e-15, 1.0))
    for step in range(6):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            model[0].grad = draw(6, 4, seed=step)
            optimizer.step()
    assert_close(*map(parameters_of, models), 1e-15)


def test_polar_express_brings_all_singular_values_near_1():
    """Newton-Schulz leaves them between 0.7 and 1.2; and parts are matrices of their own."""
    u, _, v = torch.linalg.svd(draw(12, 6), full_matrices=False)
    before = draw(12, 6, seed=1)
    express = parts.orthogonal(coefficients="polar_express", steps=8, adjust_lr="none", **EXACT)
    for split, bound in ((None, 1e-5), ({"weight": (8, 4)}, 0.2)):
        model = nn.Module()
        model.weight = nn.Parameter(before.clone())
        optimizer = fk.optimizer(model, {"weight": (express,)}, lr=1.0, split=split)
        model.weight.grad = (u * torch.logspace(0, -2.5, 6).double()) @ v
        optimizer.step()
        moved = before - model.weight.detach()
        for part in moved.split([8, 4] if split else [12]):
            assert (torch.linalg.svdvals(part) - 1).abs().max() < bound
        assert ((moved - u @ v).abs().max() < 1e-5) == (split is None)


def test_adam_and_decay_alone_are_fused_adamw_to_the_bit():
    """Embeddings, norms and biases do not decay; a scale at the end is the groups' ``lr_scale``."""
    found, chain = [], (parts.adam(0.8, 0.9, 1e-6), parts.decay(0.3))
    for make in (
        lambda m: fk.adamw(m, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6),
        lambda m: fk.optimizer(m, {"*": chain}),
        lambda m: fk.optimizer(m, {"layers.*": (*chain, parts.scale(0.25)), "*": chain}),
    ):
        model = build(torch.float32)
        optimizer = make(model)
        assert type(optimizer) is torch.optim.AdamW
        for step in range(3):
            step_with(model, optimizer, step)
        found.append(parameters_of(model))
    assert_close(found[1], found[0])
    scaled, start = found[2], parameters_of(build(torch.float32))
    assert torch.equal(scaled["output.weight"], found[0]["output.weight"])
    name = "layers.0.attention.query.weight"
    far, near = ((each[name] - start[name]).norm() for each in (found[0], scaled))
    assert near < 0.3 * far


def test_decay_of_everything_and_scales_of_other_chains():
    """``scale`` is of the decay too, and the rate of a schedule is multiplied by it."""
    model = build()
    start = parameters_of(model)
    chain = (parts.lion_sign(), parts.decay(0.5, everything=True), parts.scale(3.0))
    by_name = (parts.lion_sign(), parts.decay(0.5), parts.scale(3.0))
    names = ("embedding", "norm", "layers.0.attention.query.weight")
    chains = {**dict.fromkeys(names, by_name), "*": chain}
    state = fk.TrainState.create(model, fk.optimizer(model, chains))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.1 * group["lr_scale"]
    state.optimizer.step()
    expected = {name: w - 0.3 * (1 + 0.5 * w) for name, w in start.items()}
    assert_close(parameters_of(model), expected, 1e-15)
    shown = fk.optim.parameters_by_optimizer(model, state.optimizer)
    assert shown == {"lion_sign + decay": [*start]}


def test_stochastic_rounding_ends_any_chain():
    """With the bits of ``fk.adamw``, and with a chain of its own."""
    found = []
    rounding = parts.stochastic_rounding(4)
    for make in (
        lambda m: fk.adamw(m, weight_decay=0.1, stochastic_rounding=True, seed=4),
        lambda m: fk.optimizer(m, {"*": (parts.adam(), parts.decay(0.1), rounding)}),
        lambda m: fk.optimizer(m, {"*": (parts.lion_sign(), rounding, parts.scale(2**-9))}),
    ):
        model = build(torch.bfloat16)
        optimizer = make(model)
        step_with(model, optimizer, 0)
        found.append(parameters_of(model))
    assert_close(found[1], found[0])
    moved = found[2]["norm.weight"].float() - 1  # steps of 0.01 / 512 against 1 / 256 below 1
    assert set(moved.unique().tolist()) <= {0.0, -(2**-8), 2**-7}


# Periods, and who holds what


def soap_state(mesh=None):
    model = build(mesh=mesh)
    chains = {"matrix": (parts.soap(every=5), parts.decay(0.1)), "*": parts.adam()}
    return fk.TrainState.create(model, fk.optimizer(model, chains), mesh=mesh)


def soap_steps(state, stop):
    for number in range(state.step, stop):
        step_with(state.model, state.optimizer, number, bad=number in (2, 4, 12))
    return fk.donate(state, step=stop)


def on_some_ranks(rank, world, folder, stop, other):
    """Resume, step, save, and go on from what was saved and from what was not."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    state = soap_steps(fk.checkpoint_load(soap_state(mesh), folder), stop)
    fk.checkpoint_save(state, other).wait()
    held = [len(e["left"]) for e in state.optimizer.state.values() if "left" in e]
    again = soap_steps(fk.checkpoint_load(soap_state(mesh), other), stop + 3)
    assert_close(parameters_of(again.model), parameters_of(soap_steps(state, stop + 3).model))
    return sum(held)


@pytest.mark.slow
def test_soap_resumes_on_four_two_three_and_one_rank_amid_its_period(tmp_path):
    """Bitwise on as many ranks; each matrix's state is on one rank; bad steps count in periods."""
    straight = soap_steps(soap_state(), 20)
    matrices = 7
    for world, start, stop in ((4, 0, 7), (2, 7, 11), (3, 11, 14)):
        folders = (str(tmp_path / f"{at}") for at in (start, stop))
        held = run_again(on_some_ranks, world, next(folders), stop, next(folders), timeout_s=100)
        assert sum(held) == matrices, held
        assert max(held) < matrices, held
    last = soap_steps(fk.checkpoint_load(soap_state(), tmp_path / "14"), 20)
    assert_close(parameters_of(last.model), parameters_of(straight.model), 1e-10)


def test_periods_follow_the_state_and_not_the_calls(tmp_path):
    """A run that is resumed amid a period goes on bitwise; two bad steps lie in it."""
    chain = {"*.weight": (parts.soap(every=4), parts.decay()), "*": parts.lion_sign()}
    create = partial(alone, build=partial(fk.optimizer, chains=chain))
    step = fk.make_step(square_loss, schedule=fk.constant(0.02))

    def run(state, stop):
        while state.step < stop:
            scale = torch.nan if state.step in (2, 4) else 1.0
            state, _ = step(state, [rows(state.step, scale)])
        return state

    straight = run(create(small_model()), 14)
    fk.checkpoint_save(run(create(small_model()), 6), tmp_path, blocking=True)
    resumed = run(fk.checkpoint_load(create(small_model()), tmp_path), 14)
    assert_close(parameters_of(resumed.model), parameters_of(straight.model))
    turned = straight.optimizer.state[straight.model[0].weight]["left_basis"][0]
    assert (turned - torch.eye(4)).abs().max() > 0.1


def test_a_sum_over_shards_is_one_collective_for_all_parameters():
    """And a whole transform that reads no values is sent none: so many sums and exchanges."""
    assert run_again(count_collectives, 2)[0] == {
        "summed": (1, 0),
        "whole": (0, 2),
        "reads values": (0, 3),
        "local": (0, 0),
    }


def count_collectives(rank, world):
    mesh, found = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu"), {}
    rest = {"*": parts.lion_sign()}
    chains = {
        "summed": {"*": parts.clip_norm(0.1)},
        "whole": {"*.gate.weight": CENTER, **rest},
        "reads values": {"*.gate.weight": OWN[0], **rest},
        "local": {"*": (parts.momentum(), parts.cautious_decay())},
    }
    for name, chain in chains.items():
        model = build(mesh=mesh)
        optimizer = fk.optimizer(model, chain)
        step_with(model, optimizer, 0)
        with Watch() as watch:
            optimizer.step()
        calls = " ".join(watch.collectives).replace("_", "")
        found[name] = calls.count("allreduce"), calls.count("alltoall")
    return found


def remember(directions, state, at):
    """Everything that is returned is what was given."""
    kept = {"older": state["previous"], "previous": directions, "values": at.values}
    return [d - o for d, o in zip(directions, state["older"], strict=True)], kept


@pytest.mark.parametrize("whole", [True, False])
def test_state_may_become_what_was_given(whole):
    """Other entries, directions and values; and an optimizer is copied with all of it."""
    makes = dict.fromkeys(("older", "previous"), torch.zeros_like)
    link = parts.transform(remember, state={**makes, "values": lambda w: w}, whole=whole)
    model = nn.Linear(3, 2, bias=False).double()
    weights, gradients = [model.weight.detach().clone()], [draw(2, 3, seed=n) for n in range(4)]
    optimizer = fk.optimizer(model, {"*": (link,)}, lr=0.1)
    for step, gradient in enumerate(gradients):
        if step == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
        model.weight.grad = gradient
        optimizer.step()
        older = gradients[step - 2] if step > 1 else torch.zeros(2, 3)
        weights.append(weights[-1] - 0.1 * (gradient - older))
        torch.testing.assert_close(model.weight.detach(), weights[-1], rtol=0, atol=1e-15)
    values = optimizer.state[model.weight]["values"]
    torch.testing.assert_close(values[0] if whole else values, weights[3], rtol=0, atol=1e-15)


def test_the_transform_of_the_page_is_twelve_lines_and_runs():
    """Both chains of the page, on a model whose output has weights of its own."""
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    blocks = [b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "fk.optimizer" in b]
    for block in blocks:
        names = {"fk": fk, "torch": torch, "model": build()}
        exec(block, names)
        start = parameters_of(names["model"])
        step_with(names["model"], names["optimizer"], 0)
        moved = parameters_of(names["model"])
        assert all(not torch.equal(moved[name], start[name]) for name in start)
    function = blocks[1][: blocks[1].index("optimizer = ")]
    assert len([line for line in function.splitlines() if line.strip()]) <= 12


# What is refused


def in_place(directions, state, at):
    directions[0].mul_(2)
    return directions, state


def state_in_place(directions, state, at):
    state["kept"][0].add_(1)
    return directions, state


def transposed(directions, state, at):
    return [d.mT for d in directions], state


def forgotten(directions, state, at):
    return directions, {}


def link(apply, *names, make=torch.zeros_like, **options):
    return parts.transform(apply, state=dict.fromkeys(names, make), **options)


ADAM, REST = parts.adam(), {"*": parts.adam()}
REFUSED = {
    r"^the chain of 'router' takes no parameter of (FSDP)?Sequential: it neither is a role "
    r"\(.* nor matches a remaining name": {"router": ADAM, **REST},
    "^no chain takes '1.bias' of the role 'other', so it would never be trained; there": {
        "matrix": ADAM,
        "embedding": ADAM,
    },
    r"^'1.bias' has the shape \(6,\), and orthogonal in the chain of '1.\*' takes matrices": {
        "1.*": (parts.momentum(), parts.orthogonal()),
        **REST,
    },
    "^adam and lion_sign in the chain of .* both name their state 'exp_avg'; each": {
        "*": (ADAM, parts.lion_sign())
    },
    "^the optimizer itself and in_place in .* name their state 'step'": {
        "*": link(in_place, "step")
    },
    r"^transposed in the chain of .* got directions of \(8, 4\) .* returned \[\(4, 8\)\]": {
        "*": link(transposed)
    },
    r"^forgotten in .* and returned .* with \{\}; shapes and names": {"*": link(forgotten, "kept")},
    "^in_place changes its directions in place, so a bad step could not be": {"*": link(in_place)},
    "^state_in_place changes its kept in place, so a bad": {"*": link(state_in_place, "kept")},
    r"^in_place in .* makes its state 'rows' of shape \(8, 1\) .* Pass whole=True": {
        "*": link(in_place, "rows", make=lambda w: w[:, :1])
    },
    "^the chain of '.' decays twice; remove one": {
        "*": (ADAM, parts.decay(), parts.cautious_decay())
    },
}


def refusal(message, mesh=None):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    roles = {"0.weight": "embedding", "1.weight": "matrix"}
    with pytest.raises(ValueError, match=message) as raised:
        fk.optimizer(model, REFUSED[message], roles=roles)
    return str(raised.value).replace("FSDP", "")


@pytest.mark.parametrize("message", REFUSED)
def test_chains_that_cannot_be_are_refused_before_a_step(message):
    refusal(message)


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    return [refusal(message, mesh) for message in REFUSED]


def test_ranks_that_share_parameters_refuse_such_chains_with_the_same_words():
    """Shapes in messages are those of whole parameters."""
    alone = [refusal(message) for message in REFUSED]
    assert run_again(refusals, 2) == [alone, alone]


def test_what_changes_large_inputs_in_place_is_refused_in_its_first_step():
    def late(directions, state, at):
        return [d.mul_(2) if d.numel() > 100 else d for d in directions], state

    model = nn.Linear(32, 32, bias=False)
    optimizer = fk.optimizer(model, {"*": parts.transform(late)})
    before, model.weight.grad = model.weight.detach().clone(), torch.ones(32, 32)
    with pytest.raises(ValueError, match=r"^late changes its directions in place, so a bad"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def load_into_another_chain(rank, world, folder):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    model, other = (build(mesh=mesh) for _ in range(2))
    chain = (parts.momentum(), parts.decay())
    state = fk.TrainState.create(model, fk.optimizer(model, {"*": chain}), mesh=mesh)
    step_with(model, state.optimizer, 0)
    fk.checkpoint_save(fk.donate(state, step=1), folder, blocking=True)
    another = {"matrix": (parts.momentum(), parts.clip_norm(1.0), parts.decay()), "*": chain}
    start, optimizer = parameters_of(other), fk.optimizer(other, another)
    message = "is momentum . decay there and momentum . clip_norm . decay here"
    with pytest.raises(CheckpointError, match=message) as raised:
        fk.checkpoint_load(fk.TrainState.create(other, optimizer, mesh=mesh), folder)
    assert_close(parameters_of(other), start)
    assert not any(optimizer.state.values())
    return re.search("'(.*?)' is", str(raised.value))[1]


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_another_chain_is_refused(world, tmp_path):
    """By the parameter's name, on every rank, with weights and state as they were."""
    found = run_again(load_into_another_chain, world, str(tmp_path))
    assert found == ["layers.0.attention.query.weight"] * world
