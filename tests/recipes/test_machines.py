"""Settings for machines of 8, 64 and 512 GPUs: read, and laid out on as many pretended ranks."""

from __future__ import annotations

import math
import re
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from covering import some_of
from pool import run_ranks
from runs import load_recipe
from torch.testing._internal.distributed.fake_pg import FakeStore

import forgekit as fk
from forgekit.cli import recipes_folder
from forgekit.config import load_config
from forgekit.mesh import resolve_sizes

SETTINGS = sorted(recipes_folder().glob("*_gpus.toml"))


def _recipe_and_world(path):
    recipe, world = re.fullmatch(r"([a-z]+)_(\d+)_gpus", Path(path).stem).groups()
    return recipe, int(world)


def _config_and_world(path):
    recipe, world = _recipe_and_world(path)
    return load_config(load_recipe(recipe).Config, ["--config", str(path)]), world


def test_the_experts_have_30_billion_parameters_of_which_a_token_uses_3():
    """Counted by hand from the sizes; a token uses 8 of 128 experts."""
    (path,) = (path for path in SETTINGS if path.stem.startswith("moe"))
    spec = _config_and_world(path)[0].model
    with torch.device("meta"):
        model = fk.Transformer(spec)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    assert sum(sizes.values()) == 30_305_624_064
    assert sum(sizes.values()) - routed * 120 // 128 == 3_126_534_144
    assert (spec.moe.experts, spec.moe.top_k) == (128, 8)


def _narrow(config, world):
    """The sizes of a model with these heads and experts, and the layers that stages have."""
    narrow = {"dim": 16 * config.model.heads, "ffn_dim": 2 * world, "vocab_size": 2 * world}
    moe = config.model.moe and attrs.evolve(config.model.moe, ffn_dim=2 * world)
    layers = config.model.layers if config.mesh.pp > 1 else 4
    return attrs.evolve(config.model, **narrow, moe=moe, layers=layers)


def _lay_out(_rank, _world, path, rank, world):
    """What one of the ranks holds of a narrow model."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    config, _ = _config_and_world(path)
    mesh = fk.build_mesh(config.mesh, device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(_narrow(config, world))
    names = ("precision", "activation_checkpoint", "pipeline_schedule", "context_parallel")
    options = {name: getattr(config, name) for name in names if hasattr(config, name)}
    fk.parallelize(model, mesh, **options)
    held = dict(model.named_parameters())
    fk.shutdown()
    return {name: (tuple(p.shape), p.to_local().numel()) for name, p in held.items()}


@pytest.mark.parametrize(
    "name", some_of([path.stem for path in SETTINGS], "pretrain_64_gpus", "pretrain_512_gpus")
)
def test_every_stage_lays_its_part_out(name):
    """All stages together hold every parameter, each rank its share of each."""
    (path,) = (path for path in SETTINGS if path.stem == name)
    config, world = _config_and_world(path)
    assert config.data.seq_len == config.model.max_seq_len
    pp, _, shard, cp, tp = resolve_sizes(config.mesh, world)
    shared = shard * cp * tp
    found = {}
    for stage in range(pp):
        (held,) = run_ranks(_lay_out, 1, str(path), stage * world // pp, world, group=False)
        assert not found.keys() & held.keys()
        found |= held
    layers = {int(m[1]) for name in found if (m := re.match(r"layers\.(\d+)\.", name))}
    assert layers == set(range(_narrow(config, world).layers))
    assert {"embedding.weight", "norm.weight", "output.weight"} <= found.keys()
    matrices = [(s, local) for s, local in found.values() if len(s) > 1]
    assert all(local * shared == math.prod(s) for s, local in matrices)
