"""Models whose later blocks use what an earlier part computed: another stage does not have it."""

from __future__ import annotations

from typing import Any

import torch
import verified
from faults.table import saying
from faults.user_code import USER, train
from lab import full_tensors
from torch import Tensor

from forgekit.verification.measure import plain_backward

KINDS = {
    "a comparison": lambda x, x0: x * (1.5 - (x0.sum(-1, keepdim=True) > 0).to(x.dtype)),
    "topk": lambda x, x0: x + 0.1 * x0.topk(3).indices.sum(-1, keepdim=True),
    "where": lambda x, x0: torch.where(x0 > 0.1, x, 0.5 * x),
    "integers": lambda x, x0: x * (1 + (x0 * 4).long() % 3),
    "rounding": lambda x, x0: x + 0.1 * x0.detach().round(),
    "a number of the host": lambda x, x0: x * (1 + 0.01 * float((x0 > 0).sum())),
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
    torch.manual_seed(0)
    model = USER["model"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        plain_backward(model, USER["batches"](None, number), USER["loss"])
        optimizer.step()
    return full_tensors(model)


@saying
def train_in_stages(rank: int, world: int) -> str:
    """Whether two steps in a pipeline are those of one process, or what was refused."""
    expected = _plain(steps=2)
    state = train({"pp": world}, dtype=torch.float64, max_norm=float("inf"))
    own = full_tensors(state.model)
    worst = max(float((own[name] - expected[name]).abs().max()) for name in own)
    return f"silently wrong by {worst:.1e}" if worst > 1e-12 else ""
