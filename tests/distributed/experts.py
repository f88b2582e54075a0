"""A toy layer of experts, to show that spreading them changes nothing."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.model.dispatch import Dispatch, dispatch_local

__all__ = ["Routed", "compute_densely"]

EXPERTS = 4
CHOSEN = 2


class Experts(nn.Module):
    """Matrices of all experts, each for the tokens that its count gives it."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, dim, ffn_dim))
        self.down = nn.Parameter(torch.empty(EXPERTS, ffn_dim, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """``[n d]``, sorted by expert -> ``[n d]``."""
        numbers = torch.arange(len(counts), device=tokens.device)
        ids = numbers.repeat_interleave(counts, output_size=len(tokens))
        hidden = F.gelu(torch.einsum("nd,ndf->nf", tokens, self.up[ids]))
        return torch.einsum("nf,nfd->nd", hidden, self.down[ids])


class Routed(nn.Module):
    """Feed-forward of a few experts for each token, weighted by a router that learns.

    Experts take turns by place, unevenly, so that rounding cannot send a token to another one.
    """

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.experts = Experts(dim, ffn_dim)
        self.dispatch: Dispatch = dispatch_local

    def forward(self, x: Tensor) -> Tensor:
        """``[b s d]`` -> ``[b s d]``."""
        tokens = x.flatten(0, 1)
        turns = torch.arange(len(tokens), device=x.device)
        ids = torch.stack((turns % 3, 3 - turns % 2), dim=1)
        weights = self.router(tokens).softmax(-1).gather(1, ids)
        repeated = tokens.repeat_interleave(CHOSEN, dim=0)
        out = self.dispatch(repeated, ids.flatten(), EXPERTS, self.experts)
        mixed = (out.unflatten(0, (-1, CHOSEN)) * weights.unsqueeze(-1)).sum(1)
        return mixed.view_as(x)


def compute_densely(model: nn.Module) -> None:
    """Let every expert compute every token, in place: the reference, without order and counts."""
    for module in model.modules():
        if isinstance(module, Routed):
            module.dispatch = partial(_dense, module.experts)


def _dense(experts: Experts, tokens: Tensor, ids: Tensor, count: int, _compute: object) -> Tensor:
    hidden = F.gelu(torch.einsum("nd,edf->nef", tokens, experts.up))
    out = torch.einsum("nef,efd->ned", hidden, experts.down)
    return (out * F.one_hot(ids, count).unsqueeze(-1)).sum(1)
