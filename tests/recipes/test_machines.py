"""Settings for machines of 8, 64 and 512 GPUs: read, and laid out on as many pretended ranks."""

from __future__ import annotations

import re

import attrs
import pytest
import torch
import torch.distributed as dist
from covering import some_of
from ranks import run_ranks
from runs import load_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore

import forgekit as fk
from forgekit.cli import recipes_folder
from forgekit.config import load_config
from forgekit.mesh import resolve_sizes

SETTINGS = sorted(recipes_folder().glob("pretrain_*.toml"))


def _world(path):
    return int(re.fullmatch(r"pretrain_(\d+)_gpus", path.stem)[1])


def test_there_are_settings_for_three_machines():
    assert {_world(path) for path in SETTINGS} == {8, 64, 512}


def _config(path):
    return load_config(load_recipe("pretrain").Config, ["--config", str(path)])


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_the_sizes_fit(path):
    config, world = _config(path), _world(path)
    pp, replicate, shard, _, _ = resolve_sizes(config.mesh, world)
    rows = config.batch_size * replicate * shard
    assert config.global_batch_size % rows == 0
    assert config.global_batch_size // rows % pp == 0
    assert config.data.seq_len == config.model.max_seq_len


def _lay_out(_rank, _world, path, rank, world):
    """What one of the ranks holds of a model with these heads and layers, but narrow."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    config = _config(path)
    narrow = {"dim": 16 * config.model.heads, "ffn_dim": 2 * world, "vocab_size": 2 * world}
    spec = attrs.evolve(config.model, **narrow)
    mesh = fk.build_mesh(config.mesh, device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(spec)
    fk.parallelize(
        model,
        mesh,
        precision=config.precision,
        activation_checkpoint=config.activation_checkpoint,
        pipeline_schedule=config.pipeline_schedule,
        context_parallel=config.context_parallel,
    )
    held = dict(model.named_parameters())
    fk.shutdown()
    return {name: (tuple(p.shape), p.to_local().numel()) for name, p in held.items()}


@pytest.mark.parametrize(
    "name", some_of([path.stem for path in SETTINGS], "pretrain_64_gpus", "pretrain_512_gpus")
)
def test_every_stage_lays_its_part_out(name):
    """All stages together hold every parameter, each rank its share of each."""
    (path,) = (path for path in SETTINGS if path.stem == name)
    config, world = _config(path), _world(path)
    pp, _, shard, cp, tp = resolve_sizes(config.mesh, world)
    shared = shard * cp * tp
    found = {}
    for stage in range(pp):
        (held,) = run_ranks(_lay_out, 1, str(path), stage * world // pp, world, group=False)
        assert not found.keys() & held.keys()
        found |= held
    layers = {int(m[1]) for name in found if (m := re.match(r"layers\.(\d+)\.", name))}
    assert layers == set(range(config.model.layers))
    assert {"embedding.weight", "norm.weight", "output.weight"} <= found.keys()
    matrices = [(s, local) for s, local in found.values() if len(s) == 2]
    assert all(local * shared == s[0] * s[1] for s, local in matrices)
