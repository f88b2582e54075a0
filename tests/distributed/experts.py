"""Layers of experts without order and counts, and a toy one, to show that sharding is exact.

The reference of the library's own layers lets every expert compute every token and writes router
terms and the balance by their formulas.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.model.moe import Dispatch, MoE, dispatch_local

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


class Dense(nn.Module):
    """The library's layer by its formulas: every expert computes every token, with a weight."""

    def __init__(self, layer: MoE) -> None:
        super().__init__()
        self.spec = layer.spec
        self.router, self.experts, self.shared = layer.router, layer.experts, layer.shared
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.terms: list[Tensor] = []
        self.counts = torch.zeros(self.spec.experts, dtype=torch.float64)
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.kept = 0

    def forward(self, x: Tensor, routing: Any) -> Tensor:
        """``[b s d]`` -> ``[b s d]``; keeps the terms and the counts."""
        spec, logits = self.spec, x @ self.router.weight.T
        scores = logits.softmax(-1) if spec.router == "softmax" else logits.sigmoid()
        hits = F.one_hot(self._choose(scores.detach()), spec.experts).sum(2).to(x.dtype)
        if routing.is_token is not None:
            hits = hits * routing.is_token.unsqueeze(-1)
        where = routing.is_token if routing.targets is None else routing.targets
        self._note(logits, scores, hits, torch.ones_like(hits[..., 0]) if where is None else where)
        gates = scores * hits
        if spec.renormalize:
            gates = gates / gates.sum(-1, keepdim=True).clamp(min=1e-9)
        # Tokens queue at an expert in their order; those behind its last seat go without it.
        capacity = spec.experts if spec.capacity is None else spec.capacity
        seats = (capacity * hits.sum() / spec.experts).ceil()
        is_seated = hits.flatten(0, 1).cumsum(0).view_as(hits) <= seats
        self.kept += int((hits * is_seated).sum())
        gates = spec.scale * gates * is_seated
        gate, up, down = self.experts.gate, self.experts.up, self.experts.down
        inner = F.silu(torch.einsum("bsd,efd->bsef", x, gate))
        inner = inner * torch.einsum("bsd,efd->bsef", x, up)
        out = torch.einsum("bsef,edf,bse->bsd", inner, down, gates)
        return out if self.shared is None else out + self._share(x)

    def _choose(self, scores: Tensor) -> Tensor:
        """``[b s k]`` experts of ``[b s e]`` scores, which are equal for no two."""
        spec, bias = self.spec, self.router.selection_bias
        if spec.force_balance:
            turns = torch.arange(scores[..., 0].numel()).view(scores.shape[:2]).unsqueeze(-1)
            return (turns * spec.top_k + torch.arange(spec.top_k)) % spec.experts
        scores = scores if bias is None else scores + bias
        if spec.groups:
            members = scores.unflatten(-1, (spec.groups, -1))
            best = members.sort(-1, descending=True).values[..., : 1 + (spec.router == "sigmoid")]
            places = best.sum(-1).argsort(-1, descending=True).argsort(-1)
            is_out = (places >= spec.top_groups).unsqueeze(-1)
            scores = members.masked_fill(is_out, float("-inf")).flatten(-2)
        return scores.argsort(-1, descending=True)[..., : spec.top_k]

    def _share(self, x: Tensor) -> Tensor:
        """The sum of the shared experts, one by one."""
        weights = (self.shared.gate.weight, self.shared.up.weight, self.shared.down.weight.T)
        parts = zip(*(w.chunk(self.spec.shared) for w in weights), strict=True)
        return sum((F.silu(x @ gate.T) * (x @ up.T)) @ down for gate, up, down in parts)

    def _note(self, logits: Tensor, scores: Tensor, hits: Tensor, targets: Tensor) -> None:
        spec, rows = self.spec, hits.sum(1, keepdim=True)
        self.counts += hits.sum((0, 1))
        rows = rows / rows.sum(-1, keepdim=True).clamp(min=1)
        scores, targets = scores / scores.sum(-1, keepdim=True), targets.bool()
        aux = spec.experts * (self.router.load.double() * scores).sum(-1)
        z = logits.logsumexp(-1).square()
        value = spec.aux_loss * aux + spec.z_loss * z
        value = value + spec.sequence_aux_loss * spec.experts * (rows * scores).sum(-1)
        self.terms.append(value[targets].sum())
        self.sums += torch.stack([aux[targets].sum(), z[targets].sum()]).detach()


Chosen = tuple[list[list[float]], dict[str, float]]
"""How often each expert was chosen, by layer, and the metrics of routers."""


def _dense_layers(model: nn.Module) -> dict[str, Dense]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Dense)}


def gradients_with_terms(
    model: nn.Module, batches: list[Any]
) -> tuple[dict[str, Tensor], Tensor, Chosen]:
    """Gradients of the token mean of losses and router terms, the mean loss, and what was chosen.

    Args:
        model: With ``Dense`` layers, in float64.
        batches: Of the global batch.
    """
    layers, total = _dense_layers(model), torch.zeros((), dtype=torch.float64)
    for layer in layers.values():
        layer.clear()
    for batch in batches:
        given = {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch.keys()}  # noqa: SIM118
        logits = model(batch["input_ids"], **given, targets=batch["labels"] != -100)
        labels = batch["labels"].flatten()
        total = total + F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    model.zero_grad()
    terms = [term for layer in layers.values() for term in layer.terms]
    (torch.stack([total, *terms]).sum() / targets).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    counts = torch.stack([layer.counts for layer in layers.values()])
    sums = torch.stack([layer.sums for layer in layers.values()]).sum(0) / len(counts) / targets
    loads = counts / counts.mean(-1, keepdim=True)
    metrics = {"load_max": loads.max(), "load_min": loads.min(), "aux_loss": sums[0]}
    metrics |= {"z_loss": sums[1], "dropped": torch.zeros(())}
    values = {f"moe/{name}": float(value) for name, value in metrics.items()}
    return gradients, total.detach() / targets, (counts.tolist(), values)


@torch.no_grad()
def follow(model: nn.Module) -> None:
    """Move loads and biases by what the last gradients counted, in place."""
    for layer in _dense_layers(model).values():
        layer.router.load.copy_(layer.counts / layer.counts.sum())
        moves = layer.spec.bias_rate * (layer.counts.mean() - layer.counts).sign()
        layer.router.selection_bias += (moves - moves.mean()).float()


def balance_of(model: nn.Module) -> dict[str, list[float]]:
    """Loads and biases by name."""
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def compute_densely(model: nn.Module) -> None:
    """Let every expert compute every token, in place: the reference, without order and counts."""
    for module in list(model.modules()):
        if isinstance(module, Routed):
            module.dispatch = partial(_dense, module.experts)
        elif isinstance(getattr(module, "feed_forward", None), MoE):
            module.feed_forward = Dense(module.feed_forward)


def _dense(experts: Experts, tokens: Tensor, ids: Tensor, count: int, _compute: object) -> Tensor:
    hidden = F.gelu(torch.einsum("nd,edf->nef", tokens, experts.up))
    out = torch.einsum("nef,efd->ned", hidden, experts.down)
    return (out * F.one_hot(ids, count).unsqueeze(-1)).sum(1)
