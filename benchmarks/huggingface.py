"""Read 2 GB into two ranks: host memory, and time beside reading the same bytes.

python benchmarks/huggingface.py [DIRECTORY]

Writes a random Llama of 2 GB, tensor by tensor, then starts itself on two ranks. Each reads its
shards with ``load_huggingface``, and in turn the same bytes of the file alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import forgekit as fk
from forgekit.huggingface.families import FAMILIES
from forgekit.huggingface.load import name_map
from forgekit.huggingface.safetensors_files import SINGLE, write_json, write_tensors

SPEC = fk.TransformerSpec(
    vocab_size=16_000, dim=1_536, layers=18, heads=12, kv_heads=6, ffn_dim=4_096, max_seq_len=64
)
ROUNDS = 5


def write_random(directory: Path) -> None:
    """Write the model; no process ever holds it."""
    family = FAMILIES[0]
    shapes = name_map(family, SPEC, SPEC.vocab_size).shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    write_tensors(directory / SINGLE, entries, (torch.rand(shape) for shape in shapes.values()))
    write_json(directory / "config.json", family.write(SPEC))


def memory(key: str) -> int:
    """Bytes of this process, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def read_same(directory: Path, rank: int, world: int, room: memoryview, *, again: bool) -> None:
    """Read this rank's rows of each tensor behind each other into memory, or all to its start."""
    with (directory / SINGLE).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        begin = 0
        for first, last in (e["data_offsets"] for e in header.values() if "data_offsets" in e):
            size = (last - first) // world
            os.preadv(file.fileno(), [room[begin : begin + size]], 8 + length + first + rank * size)
            begin = 0 if again else begin + size


def measure(directory: Path) -> None:
    """What each of the ranks does."""
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    rank, world = fk.data_ranks(mesh)
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    before = memory("RssAnon")
    model = fk.parallelize(model, mesh)
    local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    fk.load_huggingface(model, directory)
    grown = memory("RssAnon") - before
    room = memoryview(torch.empty(local, dtype=torch.uint8).fill_(0).numpy())
    calls = {
        "load": lambda: fk.load_huggingface(model, directory),
        "into memory": lambda: read_same(directory, rank, world, room, again=False),
        "into a buffer": lambda: read_same(directory, rank, world, room, again=True),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            call()
            torch.distributed.barrier()
            times[name].append(time.perf_counter() - start)
    load, *others = (statistics.median(times[name]) for name in calls)
    print(  # noqa: T201
        f"rank {rank}: shards {local / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB, "
        f"memory of its own {grown / 1e6:.0f} MB; {load:.2f} s; the "
        f"same bytes {others[0]:.2f} s into memory ({load / others[0]:.2f}x), {others[1]:.2f} s "
        f"over and over into a buffer ({load / others[1]:.2f}x)"
    )
    fk.shutdown()


def main() -> None:
    """Write, start the ranks, clean up."""
    if "LOCAL_RANK" in os.environ:
        measure(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        write_random(Path(folder))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run([*command, __file__, folder], check=True)


if __name__ == "__main__":
    main()
