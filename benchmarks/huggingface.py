"""Read 2 GB into two ranks: peak host memory, and time beside reading the same bytes.

python benchmarks/huggingface.py [DIRECTORY]

Writes a random Llama of 2 GB, tensor by tensor, then starts itself on two ranks. Each reads its
shards with ``load_huggingface``, and the same bytes of the file into one buffer, in turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import forgekit as fk
from forgekit.run.huggingface.families import known_families
from forgekit.run.huggingface.files import SINGLE, stored_tensors, write_json, write_tensors
from forgekit.run.huggingface.load import name_map

SPEC = fk.TransformerSpec(
    vocab_size=16_000, dim=1_536, layers=18, heads=12, kv_heads=6, ffn_dim=4_096, max_seq_len=64
)
ROUNDS = 5


def write_random(directory: Path) -> None:
    """Write the model; no process ever holds it."""
    family = known_families()[0]
    shapes = name_map(family, SPEC, SPEC.vocab_size).shapes
    entries = {name: (torch.float32, shape) for name, shape in shapes.items()}
    write_tensors(directory / SINGLE, entries, (torch.rand(shape) for shape in shapes.values()))
    write_json(directory / "config.json", family.write(SPEC))


def memory(key: str) -> int:
    """Bytes of this process, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def read_same(directory: Path, rank: int, world: int, buffer: memoryview) -> None:
    """Read this rank's rows of each tensor, one after the other."""
    with (directory / SINGLE).open("rb") as file:
        for stored in stored_tensors(directory).values():
            size = torch.Size(stored.shape).numel() * 4 // world
            os.preadv(file.fileno(), [buffer[:size]], stored.start + rank * size)


def measure(directory: Path) -> None:
    """What each of the ranks does."""
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    rank, world = fk.data_ranks(mesh)
    with torch.device("meta"):
        model = fk.Transformer(SPEC)
    before = memory("VmRSS")
    model = fk.parallelize(model, mesh)
    local = sum(parameter.to_local().nbytes for parameter in model.parameters())
    largest = max(parameter.numel() * 4 for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    fk.load_huggingface(model, directory)
    grown = memory("VmHWM") - before
    shared = torch.empty(largest // world + 1, dtype=torch.uint8).fill_(0)
    buffer = memoryview(shared.numpy())
    times: dict[str, list[float]] = {"load": [], "read": []}
    for _ in range(ROUNDS):
        for name, call in (
            ("load", lambda: fk.load_huggingface(model, directory)),
            ("read", lambda: read_same(directory, rank, world, buffer)),
        ):
            torch.distributed.barrier()
            start = time.perf_counter()
            call()
            torch.distributed.barrier()
            times[name].append(time.perf_counter() - start)
    load, read = (statistics.median(times[name]) for name in ("load", "read"))
    bound = 1.1 * (local + largest)
    print(  # noqa: T201
        f"rank {rank}: shards {local / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB, peak "
        f"{grown / 1e6:.0f} MB of at most {bound / 1e6:.0f}; {load:.2f} s against {read:.2f} s for "
        f"reading alone ({load / read:.2f}x)"
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
