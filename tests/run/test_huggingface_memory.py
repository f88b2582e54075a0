"""A rank that reads a directory holds its own shards and one tensor more, never all of it."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import attrs
import pytest
import torch
from ranks import run_ranks

import forgekit as fk
from forgekit.huggingface.families import FAMILIES
from forgekit.huggingface.load import name_map
from forgekit.huggingface.safetensors_files import SINGLE, write_json, write_tensors

SPEC = fk.TransformerSpec(
    vocab_size=2_000, dim=512, layers=6, heads=8, kv_heads=4, ffn_dim=1_536, max_seq_len=64
)


def write_random(spec, directory):
    """Write a random Llama, tensor by tensor; no process ever holds it."""
    family = FAMILIES[0]
    shapes = name_map(family, spec, spec.vocab_size).shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    write_tensors(directory / SINGLE, entries, (torch.rand(shape) for shape in shapes.values()))
    write_json(directory / "config.json", family.write(spec))


def memory(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024


def _measure(rank, world, sizes, specs, directories):
    """The last of: bytes of the shards, of the largest tensor, and by how much the peak grew.

    The first directory is a small one: what a process loads once, code and buffers, is no part.
    """
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    return [_load(mesh, *pair) for pair in zip(specs, directories, strict=True)][-1]


def _load(mesh, spec, directory):
    gc.collect()
    with torch.device("meta"):
        model = fk.Transformer(spec)
    before = memory("VmRSS")
    model = fk.parallelize(model, mesh)
    local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak of now on
    fk.load_huggingface(model, directory)
    return local, largest, memory("VmHWM") - before


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"dp_shard": 2}, 6),
        *(
            pytest.param(sizes, 24, marks=pytest.mark.oracle)
            for sizes in ({"dp_shard": 2}, {"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1})
        ),
    ],
    ids=str,
)
def test_the_peak_is_the_shards_and_the_largest_tensor(sizes, layers, tmp_path):
    specs = [attrs.evolve(SPEC, layers=n, vocab_size=500 * n) for n in (2, layers)]
    folders = [tmp_path / "small", tmp_path / "large"]
    for spec, folder in zip(specs, folders, strict=True):
        folder.mkdir()
        write_random(spec, folder)
    whole = (folders[1] / SINGLE).stat().st_size
    for local, largest, grown in run_ranks(_measure, 2, sizes, specs, folders, setup="ranks:fresh"):
        assert local < 0.7 * whole
        assert grown < 1.1 * (local + largest), (local, largest, grown)
