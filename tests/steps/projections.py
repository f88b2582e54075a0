"""Hidden values, a projection and labels that tests of losses over a vocabulary share; float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

ROWS, PLACES, VOCAB, DIM = 3, 5, 12, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of a deviation of 3."""
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)


LABELS = torch.arange(ROWS * PLACES).reshape(ROWS, PLACES) % VOCAB  # some on every rank
LABELS[0, 2:] = -100
LABELS[2, 1] = -100
MASKED = LABELS == -100
HIDDEN, WEIGHT = draw(ROWS, PLACES, DIM), draw(VOCAB, DIM, seed=2) / 3


def reference(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """Cross-entropy and z-loss, from the targets' rows alone."""
    rows, labels = logits[labels != -100], labels[labels != -100]
    squares = [row.exp().sum().log().square() for row in rows]
    return F.cross_entropy(rows, labels, reduction="sum") + z_loss * sum(squares, torch.zeros(()))


ROWWISE = Shard(0)


def share(tensor: Tensor, placement: Placement = ROWWISE, name: str = "tp") -> DTensor:
    """A leaf of all ranks; every rank cuts what it has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))
    local = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return local.detach().requires_grad_()


def assert_alike(everyone: list[list[Tensor]], expected: list[Tensor]) -> None:
    """Right on the first rank, and the same bits on all."""
    for found in everyone:
        for mine, first, wanted in zip(found, everyone[0], expected, strict=True):
            assert mine.dtype == torch.float64
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
