"""Parameters that have other names than when they were saved."""

from __future__ import annotations

import pytest
import torch
from lab import full
from pool import run_again
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
    for number, block in enumerate(state.model):
        block.seen += torch.arange(2) + number
    for number, value in enumerate(state.average.values.values()):
        value.add_(number)
    return fk.donate(state, step=state.step + 1, samples=state.samples + 2)


def values(state):
    """All that is saved, by the name of its parameter or buffer."""
    named = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
    found = {name: [value] for name, value in named.items()}
    for name, parameter in state.model.named_parameters():
        found[name] += state.optimizer.state[parameter].values()
        found[name].append(state.average.values[name])
    return {name: [full(v).detach().clone() for v in each] for name, each in found.items()}


MLP, NOW = ("mlp", "mlp"), ("ffn", "up")
RENAMES = {
    "a tensor each": (
        NOW,
        {
            "0.ffn.weight": "0.mlp.weight",
            "0.ffn.bias": "0.mlp.bias",
            "1.up.weight": "1.mlp.weight",
            "1.up.bias": "1.mlp.bias",
        },
    ),
    "modules": (NOW, {"0.ffn": "0.mlp", "1.up": "1.mlp"}),
    "exchanged": (MLP, {"0": "1", "1": "0"}),
}


def rename(rank, world, directory, case):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu") if world > 1 else None
    saved = train(build(MLP, 0, mesh))
    fk.checkpoint_save(saved, directory, blocking=True)
    before, (names, renames) = values(saved), RENAMES[case]
    after = values(fk.checkpoint_load(build(names, 1, mesh), directory, renames=renames))
    assert len(after) == len(before) == 6
    for name, found in after.items():
        block, module, *rest = name.split(".")
        then = ("1" if block == "0" else "0") if case == "exchanged" else block
        expected = before[".".join([then, "mlp" if rest else module, *rest])]
        assert all(map(torch.equal, found, expected)), name
        assert len(found) == len(expected)


@pytest.mark.parametrize(("case", "world"), [*((case, 1) for case in RENAMES), ("exchanged", 2)])
def test_a_rename_takes_optimizer_state_buffers_and_averages_along(tmp_path, world, case):
    run_again(rename, world, str(tmp_path), case)


REFUSED = {
    "a name that was not saved": (
        {"0.ffn": "0.mpl", "1.up": "1.mlp"},
        r"of another model: it lacks '0\.ffn\.weight'",
    ),
    "two with one name": (
        {"0.ffn": "0.mlp", "1.up": "1.mlp", "0.seen": "1.seen"},
        r"renames does not fit .*: two of its names become '0\.seen'",
    ),
}


@pytest.mark.parametrize(("renames", "message"), REFUSED.values(), ids=REFUSED)
def test_renames_that_do_not_fit_are_refused_before_anything_changes(tmp_path, renames, message):
    fk.checkpoint_save(train(build(MLP)), tmp_path, blocking=True)
    state = train(build(NOW, 1))
    before = values(state)
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path, renames=renames)
    assert all(all(map(torch.equal, a, before[n])) for n, a in values(state).items())
