"""One of two ranks at its end: ``ends.py SCENE END``. Its own exit code is 3."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import forgekit as fk
import forgekit.mesh


def slow(mesh, other):
    """Let a thread of a group that the mesh keeps alive free a tensor, which takes a second."""
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        weakref.finalize(tensor, nap).atexit = False
    else:
        time.sleep(0.2)  # so that the first rank has let go of its tensor before
    dist.all_reduce(tensor, async_op=True)
    del tensor
    dist.barrier(other)


def nap():
    """Ask for the GIL every millisecond, for a second."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        time.sleep(0.001)


def many(mesh, other):
    """End with collectives of which each frees tensors in a thread."""
    groups = (other, *mesh.get_all_groups())
    start = partial(dist.all_reduce, async_op=True)
    works = [start(torch.ones(3), group=group) for _ in range(20) for group in groups]
    for work in works:
        work.wait()


def stuck(mesh, other):
    """Begin a collective that the other rank never joins, and which lives longer."""
    forgekit.mesh.PATIENCE_S = 1.0
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    else:
        time.sleep(3)
    sys.stdout.write("flushed\n")


def saves(mesh, other):
    """End while a checkpoint is written, in which ranks still wait for each other."""
    model = fk.parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    fk.checkpoint_save(state, "checkpoints", before_commit=lambda: time.sleep(0.3))


def threads():
    """Names of the threads of process groups and stores."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name.startswith(("gloo", "pt_"))]


if __name__ == "__main__":
    scene, end = sys.argv[1:]
    atexit.register(print, "handled")
    mesh = fk.build_mesh(device="cpu")
    other = dist.new_group()
    assert threads()
    globals()[scene](mesh, other)
    try:
        if end == "exits":
            sys.exit(4)
    finally:
        if end == "destroys":
            dist.destroy_process_group()
        elif end == "forks":
            if os.fork() == 0:
                sys.exit()  # without the threads
            os.wait()
        elif end != "forgets":
            fk.shutdown()
            del other
            gc.collect()  # a state and its optimizer refer to each other
            # A thread that was joined is listed until the kernel has taken it away.
            end = time.monotonic() + 5
            while scene != "stuck" and threads() and time.monotonic() < end:
                time.sleep(0.01)
            assert scene == "stuck" or not threads(), threads()
    sys.exit(3)
