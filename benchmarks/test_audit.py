"""What the checks of a run's first step cost, and those of every later step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bare import Size
from pairs import Times, band, ratio, take_turns
from pool import run_ranks
from torch import nn

import forgekit as fk
from forgekit.parallel.fsdp_step import FsdpStep

SIZE = Size(dim=256, layers=4, seq_len=256, vocab_size=4096)
LAYOUTS = {"fsdp": {"dp_shard": 2}, "replicas": {"dp_replicate": 2, "dp_shard": 1}}
WITHOUT, AGAIN, AUDITED = "without", "without again", "audited"
ROUNDS = 12
MOST = 1.30
"""The first of four micro-batches is computed once more."""
PARAMETERS = 320
CLEARED, CLEARED_AGAIN = "gradients cleared", "gradients cleared again"
MOST_OF_CLEARED = 0.65
"""Of what clearing gradients takes: 0.2 ms on a quiet core where that takes 0.31 ms."""


def _loss(model: Any, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def time_first_steps(rank: int, world: int, sizes: dict[str, int]) -> Times:
    """Time the first step of fresh states, on all ranks."""
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    names = [WITHOUT, AGAIN, AUDITED]
    times: Times = {name: [] for name in names}
    for number in range(ROUNDS + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            model = fk.parallelize(SIZE.model(), mesh)
            state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
            step = fk.make_step(_loss, schedule=fk.constant(1e-3), audit=name == AUDITED)
            dist.barrier()
            began = time.perf_counter()
            step(state, SIZE.batches())
            dist.barrier()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    return times


@pytest.fixture(scope="module", params=LAYOUTS)
def measured(request) -> tuple[str, Times]:
    return request.param, run_ranks(time_first_steps, 2, LAYOUTS[request.param], timeout_s=600)[0]


@pytest.mark.parametrize("name", [WITHOUT, AGAIN, AUDITED])
def test_first_step(show, measured, name):
    layout, times = measured
    here, noise = ratio(times, name, WITHOUT), band(times, AGAIN, WITHOUT)
    show(f"first step on two ranks, {layout}", times, name, ratio=here, band=noise)
    if name == AUDITED:
        assert here <= MOST + noise, f"{here:.3f} of a first step without, A/A {noise:.3f}"


class Stack(nn.Module):
    """Blocks of four layers, each with a weight and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for _ in range(PARAMETERS // 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[b 4]`` to ``[b 4]``."""
        for layer in self.layers:
            x = layer(x)
        return x


def time_walks(rank: int, world: int) -> Times:
    """Time what every later step looks through, beside what it clears."""
    model = fk.parallelize(Stack(), fk.build_mesh(device="cpu"), precision="bf16")
    model(torch.ones(2, 4)).sum().backward()
    sharded = FsdpStep([model])

    def look() -> None:
        sharded.hooked(model)
        sharded.before_backward(0, is_last=False)
        sharded.end(model, is_reduced=True)

    clear = sharded.begin
    return take_turns({CLEARED: clear, CLEARED_AGAIN: clear, AUDITED: look}, 300)


@pytest.fixture(scope="module")
def walks() -> Times:
    return run_ranks(time_walks, 1)[0]


@pytest.mark.parametrize("name", [CLEARED, CLEARED_AGAIN, AUDITED])
def test_later_steps(show, walks, name):
    here, noise = ratio(walks, name, CLEARED), band(walks, CLEARED_AGAIN, CLEARED)
    show(f"a later step, {PARAMETERS} parameters", walks, name, ratio=here, band=noise)
    if name == AUDITED:
        assert here <= MOST_OF_CLEARED + noise, f"{here:.3f} of clearing, A/A {noise:.3f}"
