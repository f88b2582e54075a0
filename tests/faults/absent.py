"""Models whose later blocks use what an earlier part computed: another stage does not have it."""

from __future__ import annotations

from typing import Any

import torch
import verified
from faults.user_code import USER
from lab import full
from torch import Tensor

import forgekit as fk
from forgekit.verification.measure import plain_backward

__all__ = ["KINDS", "Absent", "train_in_stages"]


def _above(x: Tensor, x0: Tensor) -> Tensor:
    return x * (1.5 - (x0.sum(-1, keepdim=True) > 0).to(x.dtype))


def _topk(x: Tensor, x0: Tensor) -> Tensor:
    return x + 0.1 * x0.topk(3).indices.sum(-1, keepdim=True)


def _where(x: Tensor, x0: Tensor) -> Tensor:
    return torch.where(x0 > 0.1, x, 0.5 * x)


def _integers(x: Tensor, x0: Tensor) -> Tensor:
    return x * (1 + (x0 * 4).long() % 3)


def _rounded(x: Tensor, x0: Tensor) -> Tensor:
    return x + 0.1 * x0.detach().round()


def _positive_count(x: Tensor, x0: Tensor) -> Tensor:
    return x * (1 + 0.01 * float((x0 > 0).sum()))


KINDS = {
    "a comparison": _above,
    "topk": _topk,
    "where": _where,
    "integers": _integers,
    "rounding": _rounded,
    "a number of the host": _positive_count,
}


class Absent(verified.Model):
    """The embedding's output steers the third block, which is on the second stage."""

    def __init__(self, kind: str) -> None:
        super().__init__("right")
        self.steer = KINDS[kind]

    def forward(self, ids: Tensor) -> Any:
        x = x0 = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 2:
                x = self.steer(x, x0)
        return self.head(x)


def _plain(steps: int) -> dict[str, Tensor]:
    """The same steps in one process, with nothing of the step."""
    model = USER["model"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        plain_backward(model, USER["batches"](None, number), USER["loss"])
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_in_stages(rank: int, world: int) -> str:
    """Whether two steps in a pipeline are those of one process, or what was refused."""
    torch.manual_seed(0)
    expected = _plain(steps=2)
    torch.manual_seed(0)
    try:
        mesh = fk.build_mesh(fk.MeshSpec(dp_shard=1, pp=world), device="cpu")
        model = fk.parallelize(USER["model"]().double(), mesh)
        state = fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
        step = fk.make_step(USER["loss"], schedule=fk.constant(0.1), max_norm=float("inf"))
        for number in range(2):
            state, _ = step(state, USER["batches"](mesh, number))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    own = {name: p.detach() for name, p in model.named_parameters()}
    errors = [(full(p) - expected[name]).abs().max() for name, p in own.items()]
    worst = float(max(errors))
    return f"silently wrong by {worst:.1e}" if worst > 1e-12 else ""
