"""Checkpoints of older versions of a state: brought up to today's, or refused."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from manifests import age
from ranks import run_again, run_ranks
from states import train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forgekit.ranks import CheckpointError
from forgekit.run.checkpoints.json_trees import SavedValue
from forgekit.run.checkpoints.load import checkpoint_load
from forgekit.run.checkpoints.migration import SavedState
from forgekit.run.checkpoints.save import checkpoint_save
from forgekit.state import TrainState, donate


class Net(nn.Module):
    """Two layers in a list, whose name changes from version to version."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 3)]))
        self.register_buffer(f"{name}_scale", torch.rand(2))

    def forward(self, rows):
        first, second = self.get_submodule(self.name)
        return second(first(rows).tanh())


class Rollouts:
    """A stream of each rank's own."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return {"at": self.at, "total": torch.tensor(2 * self.at)}

    def load_state_dict(self, state):
        self.at = state["at"]
        assert state["total"] == 2 * self.at


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Old(TrainState):
    plan: dict[str, Any]
    stream: Rollouts
    obsolete: str = "gone"


@attrs.frozen(kw_only=True, slots=True, eq=False)
class New(TrainState):
    lr: float
    marks: tuple[int, ...]
    average: torch.Tensor
    rollouts: Rollouts
    ema: torch.Tensor
    note: str = ""


OLD = {"plan": {"lr": 0.1, "marks": (1, 2), "average": torch.tensor([0.1, 0.2])}}
FRESH = {"lr": 0.0, "marks": (), "average": torch.zeros(2), "ema": torch.zeros(2, dtype=torch.half)}


def build(cls, name, world, seed=0, **fields):
    torch.manual_seed(seed)
    model, mesh = Net(name), None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.get_submodule(name):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return cls.create(model, optimizer, mesh=mesh, **fields)


def old(rank, world):
    return build(Old, "blocks", world, stream=Rollouts(10 + rank), **OLD)


def new(world):
    return build(New, "layers", world, seed=1, rollouts=Rollouts(-1), **FRESH)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def everything(state):
    """Weights, buffers and moments as whole tensors, by the names of the new version."""
    found = dict(state.model.state_dict())
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = value
    return {name.replace("blocks", "layers"): whole(tensor) for name, tensor in found.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def migrate(saved):
    """From version 1 to 2: rename a layer and a field, split one, drop one, add one."""
    assert saved.version == 1
    names = {now.replace("blocks", "layers"): then for now, then in saved.names.items()}
    fields = dict(saved.fields)
    fields |= fields.pop("plan")
    fields["rollouts"] = fields.pop("stream")
    del fields["obsolete"]
    fields |= {"ema": torch.tensor([3.0, 4.0]), "note": "from 1"}
    return attrs.evolve(saved, names=names, fields=fields)


def _save(rank, world, directory):
    state = train(old(rank, world), 2)
    checkpoint_save(state, directory, blocking=True)
    before = everything(state)
    return before, everything(train(state, 2))


def _load(rank, world, directory, drop):
    def migrate_here(saved):
        changed = migrate(saved)
        if drop:  # a stream is for as many ranks as saved it
            changed.fields["rollouts"] = {"at": 10 + rank, "total": torch.tensor(2 * (10 + rank))}
        return changed

    state = checkpoint_load(new(world), directory, version=2, migrate=migrate_here)
    assert (state.lr, state.marks, state.note, state.step) == (0.1, (1, 2), "from 1", 2)
    assert state.average.equal(torch.tensor([0.1, 0.2]))
    assert state.ema.equal(torch.tensor([3.0, 4.0]))
    assert state.rollouts.at == 10 + rank
    for parameter in state.model.parameters():
        for value in state.optimizer.state[parameter].values():
            assert isinstance(value, DTensor) == (world > 1) or not value.ndim
    before = everything(state)
    return before, everything(train(state, 2))


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_an_old_checkpoint_goes_on_bitwise_under_new_names(tmp_path, saved_on, loaded_on):
    before, after = run_again(_save, saved_on, tmp_path)[0]
    for found in run_again(_load, loaded_on, tmp_path, saved_on != loaded_on):
        assert_same(found[0], before)
        if saved_on == loaded_on:  # else sums are in another order
            assert_same(found[1], after)


@pytest.fixture
def directory(tmp_path):
    _save(0, 1, tmp_path)
    return tmp_path


def test_what_was_migrated_is_saved_as_todays_version(directory):
    state = checkpoint_load(new(1), directory, version=2, migrate=migrate)
    checkpoint_save(train(state, 1), directory, version=2, blocking=True)

    def never(saved):
        raise AssertionError(saved)

    expected = everything(checkpoint_load(new(1), directory, version=2))
    state = checkpoint_load(new(1), directory, version=2, migrate=never)
    assert (state.step, state.note, state.rollouts.at) == (3, "from 1", 10)
    assert_same(everything(state), expected)


def test_a_migration_sees_names_and_plain_values(directory):
    seen = []

    def look(saved):
        seen.append(saved)
        return migrate(saved)

    checkpoint_load(new(1), directory, version=2, migrate=look)
    (saved,) = seen
    assert isinstance(saved, SavedState)
    layers = [f"blocks.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    assert saved.names == {name: name for name in [*layers, "blocks_scale"]}
    assert (saved.fields["obsolete"], saved.fields["step"]) == ("gone", 2)
    assert saved.fields["plan"]["marks"] == (1, 2)
    assert isinstance(saved.fields["plan"]["average"], SavedValue)
    assert isinstance(saved.fields["stream"], SavedValue)


def test_what_the_model_no_longer_has_is_left_out(tmp_path):
    model = nn.ModuleDict({"kept": nn.Linear(2, 2), "gone": nn.Linear(2, 2)})
    state = TrainState.create(model, torch.optim.Adam(model.parameters()))
    model["gone"](model["kept"](torch.ones(1, 2))).sum().backward()
    state.optimizer.step()
    checkpoint_save(state, tmp_path, blocking=True)

    def drop(saved):
        names = {now: then for now, then in saved.names.items() if now.startswith("kept")}
        return attrs.evolve(saved, names=names)

    smaller = nn.ModuleDict({"kept": nn.Linear(2, 2)})
    fresh = TrainState.create(smaller, torch.optim.Adam(smaller.parameters()))
    found = checkpoint_load(fresh, tmp_path, version=2, migrate=drop)
    assert smaller["kept"].weight.equal(model["kept"].weight)
    moment = found.optimizer.state[smaller["kept"].weight]["exp_avg"]
    assert moment.equal(state.optimizer.state[model["kept"].weight]["exp_avg"])


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Two(TrainState):
    second: torch.optim.Optimizer | None = None


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Renamed(TrainState):
    another: torch.optim.Optimizer | None = None


def _second_optimizer(rank, world, directory):
    def momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def rename(saved):
        fields = dict(saved.fields)
        return attrs.evolve(saved, fields=fields | {"another": fields.pop("second")})

    state = build(Two, "layers", world)
    state = train(donate(state, second=momentum(state.model)), 1)
    state.second.step()
    checkpoint_save(state, directory, blocking=True)
    fresh = build(Renamed, "layers", world, seed=1)
    fresh = donate(fresh, another=momentum(fresh.model))
    found = checkpoint_load(fresh, directory, version=2, migrate=rename)
    for here, there in zip(found.model.parameters(), state.model.parameters(), strict=True):
        moment = found.another.state[here]["momentum_buffer"]
        assert isinstance(moment, DTensor) == (world > 1)
        assert whole(moment).equal(whole(state.second.state[there]["momentum_buffer"]))


@pytest.mark.parametrize("world", [1, 2])
def test_the_moments_of_a_renamed_optimizer_stay_sharded(tmp_path, world):
    run_again(_second_optimizer, world, tmp_path)


def test_names_may_change_places(directory):
    """Reading one into the other at the same time must not mix them up."""
    swap = {"0": "1", "1": "0"}

    def exchange(saved):
        return attrs.evolve(
            saved, names={n: ".".join(swap.get(p, p) for p in n.split(".")) for n in saved.names}
        )

    class Even(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, rows):
            return self.blocks[1](self.blocks[0](rows))

    def state():
        model = Even()
        return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1, momentum=0.9))

    before = state()
    before.model(torch.ones(1, 3)).sum().backward()
    before.optimizer.step()
    checkpoint_save(before, directory / "even", blocking=True)
    after = checkpoint_load(state(), directory / "even", version=2, migrate=exchange)
    for here, there in ((0, 1), (1, 0)):
        found, expected = after.model.blocks[here].weight, before.model.blocks[there].weight
        assert found.equal(expected)
        moments = [
            s.optimizer.state[p]["momentum_buffer"] for s, p in ((after, found), (before, expected))
        ]
        assert moments[0].equal(moments[1])


def test_a_model_alone_may_be_migrated(directory):
    state = checkpoint_load(new(1), directory, version=2, migrate=migrate, parts=("model",))
    assert (state.step, state.note, state.rollouts.at) == (0, "", -1)
    assert not state.optimizer.state
    weights = checkpoint_load(old(0, 1), directory).model.blocks[0].weight
    assert state.model.layers[0].weight.equal(weights)


def _without_rename(saved):
    return attrs.evolve(migrate(saved), names=saved.names)


def _with(key, value):
    return lambda saved: attrs.evolve(migrate(saved), names=migrate(saved).names | {key: value})


def _lost_field(saved):
    changed = migrate(saved)
    del changed.fields["samples"]
    return changed


def _odd_field(saved):
    return attrs.evolve(saved, fields=migrate(saved).fields | {"note": {1}})


def _fails(saved):
    return saved.fields["never"]


def _buried(saved):
    changed = migrate(saved)
    return attrs.evolve(changed, fields=changed.fields | {"marks": [changed.fields["rollouts"]]})


MIGRATIONS = {
    "none": (None, r"step_\d+ holds version 1 of the state, and this program has version 2\. P"),
    "no rename": (
        _without_rename,
        r"lacks 'model\.layers\.0\.weight' \(nearest: 'model\.blocks\.0\.w",
    ),
    "unknown name": (
        _with("layers.0.weight", "block.0.weight"),
        r"from a name that .* 'block\.0\.weight' \(nearest: 'blocks\.0\.weight'\)\.",
    ),
    "read twice": (
        _with("layers.0.weight", "blocks.0.bias"),
        r"both 'layers\.0\.weight' and 'layers\.0\.bias' from 'blocks\.0\.bias'\. A saved tensor",
    ),
    "lost field": (_lost_field, r"has no field 'samples'\. Mark it .* or give it one with migrate"),
    "no state": (lambda saved: saved.fields, r"migrate returned a dict instead of a SavedState"),
    "set": (_odd_field, r"field 'note' of the migration holds a set"),
    "buried": (_buried, r"kind \$ranks is inside another .* must be a field of its own"),
    "failure": (_fails, r"KeyError: 'never'"),
}


@pytest.mark.parametrize("case", MIGRATIONS)
def test_what_cannot_be_migrated_is_refused_and_changes_nothing(directory, case):
    function, message = MIGRATIONS[case]
    state = new(1)
    before = everything(state)
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(state, directory, version=2, migrate=function)
    assert_same(everything(state), before)


def test_a_newer_version_is_refused_with_or_without_a_migration(directory):
    checkpoint_save(donate(old(0, 1), step=9), directory, version=3, blocking=True)
    message = r"9 holds version 3 of the state, and this program has version 2\. Load it with the"
    for function in (None, migrate):
        with pytest.raises(CheckpointError, match=message):
            checkpoint_load(old(0, 1), directory, version=2, migrate=function)
    with pytest.raises(CheckpointError, match=r"or pass version=3 if this is it"):
        checkpoint_load(old(0, 1), directory)
    assert checkpoint_load(old(0, 1), directory, version=3).step == 9


def test_a_checkpoint_that_names_no_version_is_of_the_first(directory):
    age(directory / "step_00000002", lambda manifest: manifest.pop("version"))
    assert checkpoint_load(old(0, 1), directory).step == 2
    assert checkpoint_load(new(1), directory, version=2, migrate=migrate).step == 2


@pytest.mark.parametrize("function", [checkpoint_save, checkpoint_load])
def test_versions_count_from_one(tmp_path, function):
    with pytest.raises(ValueError, match="version 0 must be at least 1"):
        function(old(0, 1), tmp_path, version=0)


def _disagree(rank, world, directory):
    def only_here(saved):
        return migrate(saved) if rank == 0 else _fails(saved)

    with pytest.raises(CheckpointError, match=r"rank 1: KeyError: 'never'"):
        checkpoint_load(new(world), directory, version=2, migrate=only_here)
    with pytest.raises(CheckpointError, match=r"holds version 1 of the state"):
        checkpoint_load(new(world), directory, version=2)


def test_what_one_rank_cannot_migrate_no_rank_loads(directory):
    run_ranks(_disagree, 2, directory)


FORMATS = {
    "newer": (2, r"has format 2, from a newer version, written by forgekit 9\.9; .* Upgrade forge"),
    "older": (0, r"has format 0, written by forgekit 9\.9; .* Load it with the version that wrote"),
    "odd": ("1", r"has format '1', written by forgekit 9\.9; .* reads format 1\. Load it"),
}


def _refuse_format(rank, world, directory, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(old(rank, world), directory)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", FORMATS)
def test_a_format_of_another_version_is_refused_and_its_writer_named(directory, case, world):
    number, message = FORMATS[case]
    later = directory / "step_00000005"
    later.mkdir()
    (later / "manifest.json").write_text(json.dumps({"format": number, "forgekit": "9.9"}))
    run_ranks(_refuse_format, world, directory, message)
