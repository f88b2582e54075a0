"""A rank that reads a directory holds its own shards and one tensor more, never all of it.

What counts is memory of the process's own. Pages of mapped files are the system's to take back, and
how many of them are there, of the libraries too, depends on what else the machine does.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from covering import some_of
from pool import run_ranks

import forgekit as fk
from forgekit.huggingface import load
from forgekit.huggingface.families import FAMILIES
from forgekit.huggingface.safetensors_files import SINGLE, write_json, write_tensors

SPEC = fk.TransformerSpec(
    vocab_size=3_000, dim=512, layers=4, heads=8, kv_heads=4, ffn_dim=1_536, max_seq_len=64
)


def write_random(directory):
    """Write a random Llama, tensor by tensor; no process ever holds it."""
    family = FAMILIES[0]
    shapes = load.name_map(family, SPEC, SPEC.vocab_size).shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    write_tensors(directory / SINGLE, entries, (torch.rand(shape) for shape in shapes.values()))
    write_json(directory / "config.json", family.write(SPEC))


def own_memory():
    """Bytes of this process that are in memory and no part of a file."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024


def _measure(rank, world, sizes, directory):
    """Bytes of the shards, of the largest tensor, and by how much reading grew the process."""
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    model = fk.parallelize(model, mesh)
    shards = [parameter.to_local() for parameter in model.parameters()]
    for shard in shards:
        shard.detach().fill_(rank)  # memory that was never written to is not there
    peaks, begin, view_of = [], own_memory(), load.view_of

    def noting(*box):
        peaks.append(own_memory())
        return view_of(*box)

    with mock.patch.object(load, "view_of", noting):
        fk.load_huggingface(model, directory)
    assert len(peaks) >= len(shards)
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    return sum(s.nbytes for s in shards), largest, max(*peaks, own_memory()) - begin


@pytest.mark.parametrize("dimension", some_of(["dp_shard", "tp", "pp"], "tp", "pp"))
def test_the_peak_is_the_shards_and_the_largest_tensor(dimension, tmp_path):
    write_random(tmp_path)
    whole = (tmp_path / SINGLE).stat().st_size
    sizes = {"dp_shard": 1, dimension: 2}
    for shards, largest, grown in run_ranks(_measure, 2, sizes, tmp_path, setup="pool:fresh"):
        assert shards < 0.7 * whole
        assert 3 * largest < whole - shards
        assert grown < 2 * largest, (shards, largest, grown)
