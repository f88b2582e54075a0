"""A run as a user writes it: its parts are in one table, so that a fault changes one of them.

The check is what all ranks say of it: nothing, if two steps went through and moved the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
import verified
from faults.planting import Plant, both, value
from faults.table import Check, saying
from lab import SPEC

import forgekit as fk

USER: dict[str, Any] = {
    "model": lambda: fk.Transformer(attrs.evolve(SPEC, vocab_size=verified.VOCAB)),
    "plan": lambda: None,
    "options": dict,
    "state_mesh": lambda mesh: mesh,
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "batches": lambda mesh, step: [next(verified.batches(mesh)) for _ in range(4)],
    "loss": partial(verified.loss_fn, "right"),
    "before_step": lambda state: state,
}
"""What a user passes; tests replace one at a time, in the process of a rank."""


def part(name: str, by: Any) -> Plant:
    """Another part of the table."""
    return value(USER, name, by)


def on_rank_1(name: str, by: Callable[..., Any]) -> Plant:
    """A part that is another one on rank 1 alone."""
    usual = USER[name]
    return part(name, lambda *args: (by if dist.get_rank() == 1 else usual)(*args))


def own_model(model: Callable[[], Any], plan: Callable[[], Any] = lambda: verified.PLAN) -> Plant:
    """A model of the user's own, with a plan of how ranks share it."""
    return both(part("model", model), part("plan", plan))


def train(sizes: dict[str, int], steps: int = 2, dtype: Any = torch.float32, **options: Any) -> Any:
    """Take steps with the parts of the table; the state after them."""
    torch.manual_seed(0)
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device="cpu")
    model = USER["model"]().to(dtype)
    if USER["state_mesh"](mesh) is not None:  # a mesh that was forgotten
        model = fk.parallelize(model, mesh, plan=USER["plan"](), **USER["options"]())
    state = fk.TrainState.create(model, USER["optimizer"](model), mesh=USER["state_mesh"](mesh))
    step = fk.make_step(lambda *args: USER["loss"](*args), schedule=fk.constant(0.1), **options)
    for number in range(steps):
        state = USER["before_step"](state)
        state, metrics = step(state, USER["batches"](mesh, number))
        assert not metrics["skipped"], "a step was skipped"
    return state


@saying
def _refuse(sizes: dict[str, int], rank: int, world: int) -> str:
    train(sizes)
    return ""


def refusing(*layouts: str) -> dict[str, Check]:
    """A check of a user's run in each layout of two ranks, such as ``"tp"``."""
    return {
        f"user {name}": Check(measure=partial(_refuse, {name: 2}), alone=True) for name in layouts
    }
