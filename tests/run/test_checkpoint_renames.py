"""Parameters that have other names than when they were saved."""

from __future__ import annotations

import pytest
import torch
from ranks import run_again
from torch import nn

import forgekit as fk


class Block(nn.Module):
    """A block whose module is called as the program calls it today."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, nn.Linear(3, 3))
        self.register_buffer("seen", torch.zeros(2))


def build(names, seed=0, mesh=None):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Block(name) for name in names)).double()
    if mesh is not None:
        fk.parallelize(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return fk.TrainState.create(model, optimizer, mesh=mesh, average=fk.EMA(0.5))


def train(state):
    for number, parameter in enumerate(state.model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 + number)
    state.optimizer.step()
    for block in state.model:
        block.seen += torch.arange(2)
    for name, value in state.average.values.items():
        value.add_(len(name))
    return fk.donate(state, step=state.step + 1, samples=state.samples + 2)


def values(state):
    """All that is saved, in the order of the model."""
    full = [*state.model.parameters(), *state.model.buffers()]
    for parameter in state.model.parameters():
        full += state.optimizer.state[parameter].values()
    full += state.average.values.values()
    return [getattr(v, "full_tensor", lambda v=v: v)().detach().clone() for v in full]


RENAMES = {
    "a tensor each": {
        "0.ffn.weight": "0.mlp.weight",
        "0.ffn.bias": "0.mlp.bias",
        "1.up.weight": "1.mlp.weight",
        "1.up.bias": "1.mlp.bias",
    },
    "modules": {"0.ffn": "0.mlp", "1.up": "1.mlp"},
    "exchanged": {"0": "1", "1": "0"},
}


def rename(rank, world, directory, case):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu") if world > 1 else None
    old = train(build(["mlp", "mlp"], 0, mesh))
    fk.checkpoint_save(old, directory, blocking=True)
    expected = values(old)
    new = ["mlp", "mlp"] if case == "exchanged" else ["ffn", "up"]
    state = fk.checkpoint_load(build(new, 1, mesh), directory, renames=RENAMES[case])
    if case == "exchanged":
        swapped = train(build(["mlp", "mlp"], 0, mesh))
        expected = [v for _, v in exchanged(swapped)]
        loaded = [v for _, v in by_name(state)]
    else:
        loaded = values(state)
    assert len(loaded) == len(expected) > 20
    for one, other in zip(loaded, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def by_name(state):
    named = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    pairs = dict(named)
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            pairs[f"{name} {key}"] = value
    pairs |= {f"{name} average": value for name, value in state.average.values.items()}
    full = {n: getattr(v, "full_tensor", lambda v=v: v)().detach() for n, v in pairs.items()}
    return sorted(full.items())


def exchanged(state):
    other = {"0": "1", "1": "0"}
    return sorted((other[name[0]] + name[1:], value) for name, value in by_name(state))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", RENAMES)
def test_a_rename_takes_optimizer_state_buffers_and_averages_along(tmp_path, world, case):
    run_again(rename, world, str(tmp_path), case)


REFUSED = {
    "a name that was not saved": (
        {"0.ffn": "0.mpl", "1.up": "1.mlp"},
        r"renames does not fit .*: it has no '0\.mpl' to rename",
    ),
    "two with one name": (
        {"0.ffn.weight": "0.mlp.weight", "0.ffn": "0.mlp", "1.up": "1.mlp", "0.seen": "1.seen"},
        r"two of its names become '0\.seen'",
    ),
    "too few": ({"0.ffn": "0.mlp"}, r"of another model: it lacks '1\.up\.weight'|it lacks 'model"),
}


@pytest.mark.parametrize(("renames", "message"), REFUSED.values(), ids=REFUSED)
def test_renames_that_do_not_fit_are_refused_before_anything_changes(tmp_path, renames, message):
    fk.checkpoint_save(train(build(["mlp", "mlp"])), tmp_path, blocking=True)
    state = train(build(["ffn", "up"], 1))
    before = values(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, renames=renames)
    assert all(torch.equal(a, b) for a, b in zip(values(state), before, strict=True))
