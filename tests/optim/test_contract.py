"""What every optimizer keeps to: skips, groups, decay, names, resuming, layouts."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from lab import Watch, full
from optim.optimizers import (
    BUILDERS,
    CHAINS,
    DTYPES,
    assert_close,
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
SHARDED = ("stochastic", "muon", "schedule_free", *CHAINS)
"""Those of ours; Lion is stepped as what is local of a chain."""
RULE = fk.EMA(0.75)


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
            with Watch() as reads:
                state, _ = step(state, [batch(bad)])
            assert number != 2 or not reads.host_reads
            if bad and number:
                assert_close(parameters_of(model), before[0])
                assert_close(entries_of(model, state.optimizer), before[1])
            assert int(state.skipped) == bad
        found = parameters_of(model) | entries_of(model, state.optimizer)
        run.append(found | {f"average.{n}": v for n, v in state.average.values.items()})
        assert int(state.average.count) == 3
    if name != "soap":  # its period is one of all steps, the bad ones too
        assert_close(run[1], run[0])
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
        # Cautious decay goes along with an update, and here is none.
        is_cautious = name == "normuon" and key.startswith("layers.")
        expected = start[key] * (1 - 0.5 * decays[parameter] * (not is_cautious))
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
    """Also where the groups have their parameters in another order."""
    model = build(DTYPES[name])
    state = fk.TrainState.create(model, BUILDERS[name](model))
    for number in range(2):
        step_with(model, state.optimizer, number)
    state = fk.donate(state, step=2)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    saved = entries_of(model, state.optimizer)
    other = build(DTYPES[name])
    again = BUILDERS[name](other)
    for group in again.param_groups:
        pairs = [*zip(group["params"], group.get("keys", group["params"]), strict=True)]
        group["params"] = [parameter for parameter, _ in reversed(pairs)]
        if "keys" in group:
            group["keys"] = [key for _, key in reversed(pairs)]
    resumed = fk.checkpoint_load(fk.TrainState.create(other, again), tmp_path)
    assert_close(entries_of(other, resumed.optimizer), saved)
    for one, optimizer in ((model, state.optimizer), (other, resumed.optimizer)):
        step_with(one, optimizer, 2)
    assert_close(parameters_of(other), parameters_of(model))
    assert_close(entries_of(other, resumed.optimizer), entries_of(model, state.optimizer))


def create(name, model, mesh):
    """One of them has an average of its own, and schedule-free AdamW that of its steps."""
    average = RULE if name == "muon" else None
    return fk.TrainState.create(model, BUILDERS[name](model), mesh=mesh, average=average)


def values_of(state):
    average = {} if state.average is None else state.average.values
    return {
        "parameters": parameters_of(state.model),
        "average": {name: full(value).clone() for name, value in average.items()},
        "entries": entries_of(state.model, state.optimizer),
    }


def next_of(state):
    """What a state holds, and the parameters after its next step."""
    found = values_of(state)
    step_with(state.model, state.optimizer, 2)
    return found | {"after": parameters_of(state.model)}


def run_layout(name, mesh=None, moe=False, layers=1, folder=None):
    """Steps 0, a bad one, and 1; with a folder it saves and takes one more."""
    state = create(name, build(DTYPES[name], moe=moe, mesh=mesh, layers=layers), mesh)
    for number, bad in enumerate((False, True, False)):
        step_with(state.model, state.optimizer, number // 2, bad=bad)
        if state.average is not None:
            state.average.advance(torch.tensor(not bad), number)
    found = values_of(state)
    if name in ("muon", "schedule_free"):
        with fk.averaged(state):
            inside = parameters_of(state.model)
        assert_close(parameters_of(state.model), found["parameters"])
        found["swapped"] = inside
    if folder is not None:
        state = fk.donate(state, step=2)
        fk.checkpoint_save(state, f"{folder}/{name}").wait()
        found |= next_of(state)
    return found


def find_layouts(rank, world, layouts, folder, layers):
    found = {}
    for layout, (sizes, moe) in layouts.items():
        mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1} | sizes), device="cpu")
        for name in SHARDED:
            kept = folder if layout == "fsdp" else None
            found[layout, name] = run_layout(name, mesh, moe, layers, kept)
    return found


def resume_on_ranks(rank, world, folder):
    """Load what four ranks saved, and take the step that comes next."""
    mesh, found = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu"), {}
    for name in SHARDED:
        state = create(name, build(DTYPES[name], mesh=mesh), mesh)
        found[name] = next_of(fk.checkpoint_load(state, f"{folder}/{name}"))
    return found


def check_layouts(layouts, world, folder, layers=1):
    by_rank = run_again(find_layouts, world, layouts, str(folder), layers, timeout_s=200)
    for layout, name in by_rank[0]:
        # A pipeline's ranks hold different parameters, and owners different matrices.
        expected = run_layout(name, moe=layouts[layout][1], layers=layers)
        for what, tensors in expected.items():
            whole = union(found[layout, name][what] for found in by_rank)
            assert_close(whole, tensors, CLOSE[name])
    return by_rank


def union(by_rank):
    return dict(chain.from_iterable(tensors.items() for tensors in by_rank))


@pytest.mark.slow
def test_layouts_agree_and_four_ranks_resume_on_two_bitwise(tmp_path):
    """FSDP2 with uneven rows; TP, FSDP2 and EP with stacks of experts."""
    saved = check_layouts(LAYOUTS, 4, tmp_path)
    resumed = run_again(resume_on_ranks, 2, str(tmp_path), timeout_s=100)
    for name in SHARDED:
        for what in resumed[0][name]:
            bound = CLOSE[name] if what == "after" else 0.0
            expected = union(found["fsdp", name][what] for found in saved)
            assert_close(union(found[name][what] for found in resumed), expected, bound)


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
