"""What every optimizer keeps to: skips, groups, decay, names, resuming, layouts."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from lab import Watch, full
from optim.optimizers import (
    BUILDERS,
    DTYPES,
    build,
    entries_of,
    parameters_of,
    step_with,
)
from pool import run_again
from tensordict import TensorDict

import forgekit as fk
from forgekit.steps.update import skips_on_device

LAYOUTS = {
    "fsdp": ({"dp_shard": 4}, False),
    "tp and ep": ({"dp_shard": 2, "tp": 2, "ep": 2}, True),
}
CLOSE = dict.fromkeys(BUILDERS, 1e-12) | {"stochastic": 0.0}
"""Of values near 1; where the rounding is a hash, the same bits."""
SHARDED = ("stochastic", "muon", "schedule_free")
"""Those of ours; Lion and ``rms`` are stepped as schedule-free AdamW is."""
RULE = fk.EMA(0.75)


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert [n for n in expected if bits(found[n]) != bits(expected[n])] == []


def assert_close(found, expected, bound):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).abs().max()
        assert error <= bound * max(1.0, float(tensor.double().abs().max())), (name, float(error))


def batch(bad=False):
    ids = torch.randint(0, 22, (2, 7), generator=torch.Generator().manual_seed(0))
    keep = torch.tensor([torch.nan if bad else 1.0]).expand(2, 1)
    return TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:], "factor": keep}, [2])


def loss_fn(model, batch):
    loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
    return fk.Loss(loss.sum * batch["factor"].mean(), loss.count)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_skipped_step_leaves_every_bit(name):
    """A step with NaN gradients, first and in between, without a host read; averages included."""
    run = []
    for batches in ([False, False, False], [True, False, True, False, False]):
        model = build(DTYPES[name])
        state = fk.TrainState.create(model, BUILDERS[name](model), average=RULE)
        assert skips_on_device(state.optimizer)
        step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
        for number, bad in enumerate(batches):
            before = parameters_of(model), entries_of(model, state.optimizer)
            if number == 2:
                with Watch() as reads:
                    state, _ = step(state, [batch(bad)])
                assert reads.host_reads == []
            else:
                state, _ = step(state, [batch(bad)])
            if bad and number:
                assert_same_bits(parameters_of(model), before[0])
                assert_same_bits(entries_of(model, state.optimizer), before[1])
            assert int(state.skipped) == bad
        found = parameters_of(model) | entries_of(model, state.optimizer)
        run.append(found | {f"average.{n}": v for n, v in state.average.values.items()})
        assert int(state.average.count) == 3
    assert_same_bits(run[1], run[0])
    start = parameters_of(build(DTYPES[name]))
    assert all(not torch.equal(run[0][n], start[n]) for n in start)
    assert all(not torch.equal(run[0][f"average.{n}"], start[n].to(v)) for n, v in start.items())


@pytest.mark.parametrize("name", BUILDERS)
def test_groups_decay_and_scales_of_rates_are_obeyed(name):
    """Without a gradient a step is the decay alone; a group whose rate is 0 does not move."""
    model = build(DTYPES[name])
    optimizer = BUILDERS[name](model)
    start = parameters_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert set(decays.values()) == {0.0, 0.1}
    for key, parameter in model.named_parameters():
        expected = start[key] * (1 - 0.5 * decays[parameter])
        close = 2**-6 * float(start[key].abs().max()) if name == "stochastic" else 1e-15
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=close)
    assert decays[model.embedding.weight] == 0.0
    assert decays[model.layers[0].attention.query.weight] == 0.1
    stays = optimizer.param_groups[0]
    stays["lr_scale"] = 0.0
    before = parameters_of(model)
    step_with(model, optimizer, 0)
    for key, parameter in model.named_parameters():
        is_kept = any(parameter is p for p in stays["params"])
        assert torch.equal(parameter, before[key]) == is_kept, key


@pytest.mark.parametrize("name", BUILDERS)
def test_state_is_saved_by_parameter_name_and_resumes_bitwise(name, tmp_path):
    model = build(DTYPES[name])
    state = fk.TrainState.create(model, BUILDERS[name](model))
    for number in range(2):
        step_with(model, state.optimizer, number)
    state = fk.donate(state, step=2)
    path = fk.checkpoint_save(state, tmp_path, blocking=True).wait()
    saved = entries_of(model, state.optimizer)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["optimizer"].keys() == dict(model.named_parameters()).keys()
    assert {f"optimizer.{key}" for key in saved} <= manifest["tensors"].keys()
    other = build(DTYPES[name])
    again = BUILDERS[name](other)
    for group in again.param_groups:
        pairs = [*zip(group["params"], group.get("keys", group["params"]), strict=True)]
        group["params"] = [parameter for parameter, _ in reversed(pairs)]
        if "keys" in group:
            group["keys"] = [key for _, key in reversed(pairs)]
    resumed = fk.checkpoint_load(fk.TrainState.create(other, again), tmp_path)
    assert_same_bits(entries_of(other, resumed.optimizer), saved)
    for one, optimizer in ((model, state.optimizer), (other, resumed.optimizer)):
        step_with(one, optimizer, 2)
    assert_same_bits(parameters_of(other), parameters_of(model))
    assert_same_bits(entries_of(other, resumed.optimizer), entries_of(model, state.optimizer))


def create(name, model, mesh):
    """One of them has an average of its own, and schedule-free AdamW that of its steps."""
    average = RULE if name == "muon" else None
    return fk.TrainState.create(model, BUILDERS[name](model), mesh=mesh, average=average)


def values_of(state):
    average = {} if state.average is None else state.average.values
    return {
        "parameters": parameters_of(state.model),
        "average": {name: full(value).clone() for name, value in average.items()},
    }


def run_layout(mesh, moe, names, save_in=None, layers=1):
    """Steps 0, a bad one, and 1 of each optimizer; with a folder saves and takes step 2."""
    found, models = {}, {}
    for name in names:
        dtype = DTYPES[name]
        if dtype not in models:
            model = build(dtype, moe=moe, mesh=mesh, layers=layers)
            models[dtype] = model, {n: p.detach().clone() for n, p in model.named_parameters()}
        model, start = models[dtype]
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(start[key])
        state = create(name, model, mesh)
        for number, bad in enumerate((False, True, False)):
            step_with(model, state.optimizer, number // 2, bad=bad)
            if state.average is not None:
                state.average.advance(torch.tensor(not bad), number)
        found[name] = values_of(state)
        if name in ("muon", "schedule_free"):
            found[name]["swapped"] = swapped(state)
        if save_in is not None:
            state = fk.donate(state, step=2)
            fk.checkpoint_save(state, f"{save_in}/{name}").wait()
            found[name]["entries"] = entries_of(model, state.optimizer)
            step_with(model, state.optimizer, 2)
            found[name]["after"] = parameters_of(model)
    return found


def swapped(state):
    """What the model holds while the average stands in for it; an error must not keep it."""
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    inside = {}
    with contextlib.suppress(ZeroDivisionError), fk.averaged(state):
        inside = parameters_of(state.model)
        _ = 1 / 0
    now = dict(state.model.named_parameters())
    for name, parameter in before.items():
        local, then = (
            t.detach().to_local() if hasattr(t, "to_local") else t for t in (now[name], parameter)
        )
        assert bits(local) == bits(then)
    return inside


def on_ranks(rank, world, layouts, names, save_in, layers):
    found = {}
    for layout, (sizes, moe) in layouts.items():
        mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1} | sizes), device="cpu")
        folder = save_in if layout == "fsdp" else None
        found[layout] = run_layout(mesh, moe, names, folder, layers)
    return found


def resume_on_ranks(rank, world, folder, names):
    """Load what four ranks saved, and take the step that comes next."""
    mesh, found = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu"), {}
    for name in names:
        model = build(DTYPES[name], mesh=mesh)
        state = fk.checkpoint_load(create(name, model, mesh), f"{folder}/{name}")
        found[name] = values_of(state) | {"entries": entries_of(model, state.optimizer)}
        step_with(model, state.optimizer, 2)
        found[name]["after"] = parameters_of(model)
    return found


def merged(by_rank, layout, name, what):
    """A pipeline's ranks hold different parameters."""
    return {n: t for found in reversed(by_rank) for n, t in found[layout][name][what].items()}


def check_layouts(layouts, world, folder, layers=1):
    kinds = {moe for _, moe in layouts.values()}
    whole = {moe: run_layout(None, moe, SHARDED, layers=layers) for moe in kinds}
    by_rank = run_again(on_ranks, world, layouts, SHARDED, str(folder), layers, timeout_s=200)
    for layout, (_, moe) in layouts.items():
        for name in SHARDED:
            for what, expected in whole[moe][name].items():
                assert_close(merged(by_rank, layout, name, what), expected, CLOSE[name])
    return by_rank[0]


@pytest.mark.slow
def test_layouts_agree_and_four_ranks_resume_on_two_bitwise(tmp_path):
    """FSDP2 with uneven rows; TP, FSDP2 and EP with stacks of experts."""
    saved = check_layouts(LAYOUTS, 4, tmp_path)["fsdp"]
    resumed = run_again(resume_on_ranks, 2, str(tmp_path), SHARDED, timeout_s=100)[0]
    for name in SHARDED:
        for what in ("parameters", "average", "entries"):
            assert_same_bits(resumed[name][what], saved[name][what])
        assert_close(resumed[name]["after"], saved[name]["after"], CLOSE[name])


LARGE = {
    "fsdp of eight": ({"dp_shard": 8}, True),
    "hsdp and tp": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, False),
    "hsdp and ep": ({"dp_replicate": 2, "dp_shard": 4, "ep": 2}, True),
    "cp": ({"dp_shard": 4, "cp": 2}, False),
    "pp and tp": ({"pp": 2, "dp_shard": 2, "tp": 2}, False),
}


@pytest.mark.oracle
def test_eight_ranks_agree(tmp_path):
    """Three dimensions of a mesh, pipelines, ranks without a row, whole and replicated experts."""
    check_layouts(LARGE, 8, tmp_path, layers=2)


# Optimizers of others on sharded parameters


class Eager(torch.optim.Optimizer):
    """Momentum that begins in the constructor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"].lerp_(parameter.grad, 0.5)
            parameter.sub_(self.state[parameter]["mean"], alpha=0.01)


OTHERS = {
    "Adafactor": (torch.optim.Adafactor, False),
    "state from the constructor": (Eager, True),
}


def _first_steps(rank, world):
    """By optimizer what is raised when a state is made, or how far a first step moves weights."""
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    return {name: _first_step(mesh, make) for name, (make, _) in OTHERS.items()}


def _first_step(mesh, make):
    model = build(torch.float32, mesh=mesh)
    before = parameters_of(model)
    rest = fk.adamw(model)
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if p.ndim != 2]
    chain = fk.chain_optimizers(make([p for p in model.parameters() if p.ndim == 2]), rest)
    count = len(chain.state)
    try:
        fk.TrainState.create(model, chain, mesh=mesh)
    except ValueError as error:
        assert all(torch.equal(before[n], p) for n, p in parameters_of(model).items())
        return str(error)
    assert len(chain.state) == count, "the trial leaves no state"
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    chain.step()
    return max((before[n] - p).abs().max().item() for n, p in parameters_of(model).items())


def test_an_optimizer_that_cannot_step_shards_is_refused_before_the_first_update():
    for by_name in run_again(_first_steps, 2):
        for name, (_, is_able) in OTHERS.items():
            if is_able:
                assert by_name[name] > 9e-4, name
            else:
                message = f"{name} cannot step sharded parameters ("
                assert str(by_name[name]).startswith(message), by_name[name]
