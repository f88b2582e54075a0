"""Routing of tokens to experts, and the statistics of routers.

A router scores all experts and keeps ``k`` of them. Everything that it needs besides its weights,
and everything that it reports, is in one ``Routing`` for each call of the model, an argument that
passes through the blocks. Recomputation calls a block with the same arguments again: it finds the
choice there and repeats it, and writes the same notes over the old ones, so nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.model.moe_spec import MoESpec
from forgekit.tensors import wide

SMALLEST = 1e-20
"""Added to sums of weights, as in DeepSeek-V3: sigmoid scores may all be 0."""


@attrs.frozen(eq=False)
class Routing:
    """Router inputs and statistics of one forward pass.

    Attributes:
        scale: ``[]`` by which gradients of router terms are multiplied: the loss scale, as they
            are sums like the loss.
        notes: Counts and sums of each layer's router; see ``Router.forward``.
        is_token: ``[b s]`` bool, False on padding; None if no position is padding.
        targets: ``[b s]`` bool, where router terms are summed; None: on every token.
        choices: By layer ``[b s k]`` int64 experts, filled by the first forward.
        shares: By layer ``[b 1 e]``, each row's load; filled by the first forward.
    """

    scale: Tensor | float = 1.0
    notes: dict[str, dict[str, Tensor]] = attrs.field(factory=dict)
    is_token: Tensor | None = None
    targets: Tensor | None = None
    choices: dict[str, Tensor] = attrs.field(factory=dict)
    shares: dict[str, Tensor] = attrs.field(factory=dict)

    def sum_of_targets(self, values: Tensor) -> Tensor:
        """Sum ``[b s]`` values over target positions, ``[]``."""
        where = self.is_token if self.targets is None else self.targets
        return values.sum() if where is None else torch.where(where, values, 0.0).sum()


def whole_rows(counts: Tensor) -> Tensor:
    """Return ``[b e]`` counts as they are: all positions of the rows are here."""
    return counts


class Router(nn.Module):
    """Scores all experts for each token, in float32 or wider, and chooses ``k``.

    ``sum_slices`` is a socket: a plain callable that ``parallelize`` replaces where a sequence is
    sharded over ranks, to add up what they counted in the same rows.

    Attributes:
        load: ``[e]`` float32 buffer: share of the tokens that each expert got in the last good
            step, uniform at first.
        selection_bias: ``[e]`` float32 buffer, added to scores for the choice alone; None unless
            the spec asks for it.

    References:
        Balancing by bias, https://arxiv.org/abs/2408.15664;
        groups, https://arxiv.org/abs/2412.19437
    """

    load: Tensor
    selection_bias: Tensor | None

    def __init__(self, dim: int, spec: MoESpec, layer: str) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.sum_slices: Callable[[Tensor], Tensor] = whole_rows
        self.weight = nn.Parameter(torch.empty(spec.experts, dim))
        empty = torch.empty(spec.experts, dtype=torch.float32)
        self.register_buffer("load", empty)
        self.register_buffer("selection_bias", empty.clone() if spec.has_bias else None)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Reset buffers to their initial values, in place."""
        self.load.fill_(1 / self.spec.experts)
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose experts and compute their weights.

        Notes, where gradients are computed, ``counts`` (``[e]``: how often each expert was
        chosen), ``kept`` (how many of these are computed), ``positions`` (where terms are summed),
        ``aux_loss`` and ``z_loss`` (their sums before they are weighted) and ``bias_range``.

        Args:
            x: ``[b s d]``.
            routing: Of this call of the model; noted in.

        Returns:
            ``[b s k]`` weights, float32 or wider; ``[b s k]`` int64 experts, ``e`` where none
            computes: on padding and beyond an expert's capacity; and the weighted sum of the
            router terms, None if there is none.
        """
        dtype = wide(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            scores = logits.softmax(-1) if self.spec.router == "softmax" else logits.sigmoid()
            choice = _once(routing.choices, self.layer, lambda: self._choose(scores.detach()))
            weights = scores.gather(-1, choice)
            if self.spec.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST)
            counts, admitted = self._admit(choice, routing.is_token)
            term = None
            if torch.is_grad_enabled():
                kept = (admitted < self.spec.experts).sum()
                note, term = self._terms(logits, scores, choice, routing)
                routing.notes[self.layer] = {"counts": counts, "kept": kept, **note}
        return weights * self.spec.scale, admitted, term

    @torch.no_grad()
    def rebalance(self, counts: Tensor, is_good: Tensor, rate: float) -> None:
        """Update load and selection bias by global counts, in place; a bad step changes nothing.

        Args:
            counts: ``[e]`` float64, how often each expert was chosen.
            is_good: ``[]`` bool.
            rate: By how much the bias of an expert goes up that was chosen less than the mean.
        """
        is_good = is_good & (counts.sum() > 0)
        self.load.copy_(torch.where(is_good, counts / counts.sum(), self.load))
        if self.selection_bias is None or not rate:
            return
        change = (counts.mean() - counts).sign() * rate
        if self.spec.centered:
            change = change - change.mean()
        moved = self.selection_bias + change.to(self.selection_bias.dtype)
        self.selection_bias.copy_(torch.where(is_good, moved, self.selection_bias))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move buffers but never cast them: a 16-bit bias would choose other experts."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

    def _choose(self, scores: Tensor) -> Tensor:
        """``[b s e]`` scores -> ``[b s k]`` int64."""
        spec = self.spec
        if spec.force_balance:
            shape = (*scores.shape[:-1], spec.top_k)
            turns = torch.arange(scores[..., 0].numel() * spec.top_k, device=scores.device)
            return (turns % spec.experts).view(shape)
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if spec.groups is not None and spec.top_groups is not None:
            scores = _within_groups(scores, spec.groups, spec.top_groups, spec.router)
        return scores.topk(spec.top_k, dim=-1).indices

    @torch.no_grad()
    def _admit(self, choice: Tensor, is_token: Tensor | None) -> tuple[Tensor, Tensor]:
        """Count a choice and put ``e`` where no expert computes, without a host read.

        Earlier positions come first, so that no token's experts depend on later tokens.
        """
        experts, capacity = self.spec.experts, self.spec.capacity
        if is_token is not None:
            choice = choice.masked_fill(~is_token.unsqueeze(-1), experts)
        flat = choice.flatten()
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        if capacity is not None:
            ordered, order = torch.sort(flat, stable=True)
            starts = counts.cumsum(0) - counts
            turn = torch.arange(len(flat), device=flat.device) - starts[ordered]
            room = (counts[:-1].sum().double() * capacity / experts).ceil()
            admitted = torch.where(turn < room, ordered, experts)
            choice = torch.empty_like(flat).scatter_(0, order, admitted).view_as(choice)
        return counts[:-1], choice

    def _terms(
        self, logits: Tensor, scores: Tensor, choice: Tensor, routing: Routing
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Sum router terms over target positions, unweighted and as one weighted term."""
        spec, load, bias = self.spec, self.load.to(scores.dtype), self.selection_bias
        if spec.router == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
        # A term of weight 0 is still reported, without a graph.
        for_aux = scores if spec.aux_loss else scores.detach()
        for_z = logits if spec.z_loss else logits.detach()
        values = [
            ("aux_loss", spec.aux_loss, for_aux @ (spec.experts * load)),
            ("z_loss", spec.z_loss, for_z.logsumexp(-1).square()),
        ]
        if spec.sequence_aux_loss:
            share_rows = partial(self._share_rows, choice, routing.is_token)
            shares = _once(routing.shares, self.layer, share_rows).to(scores.dtype)
            value = (scores * (spec.experts * shares)).sum(-1)
            values.append(("sequence_aux_loss", spec.sequence_aux_loss, value))
        notes = {"positions": routing.sum_of_targets(torch.ones_like(scores[..., 0]))}
        notes["bias_range"] = load.new_zeros(()) if bias is None else bias.max() - bias.min()
        term = None
        for name, weight, value in values:
            total = routing.sum_of_targets(value)
            notes[name] = total.detach()
            if weight:
                term = weight * total if term is None else term + weight * total
        return notes, term

    def _share_rows(self, choice: Tensor, is_token: Tensor | None) -> Tensor:
        """Compute each expert's share of whole rows, ``[b 1 e]`` float64; 0 without tokens."""
        ones = torch.ones_like(choice)
        ones = ones if is_token is None else is_token.unsqueeze(-1).expand_as(choice)
        shape = len(choice), self.spec.experts
        counts = torch.zeros(shape, dtype=torch.float64, device=choice.device)
        counts.scatter_add_(1, choice.flatten(1), ones.flatten(1).to(counts.dtype))
        counts = self.sum_slices(counts)
        return (counts / counts.sum(-1, keepdim=True).clamp(min=1)).unsqueeze(1)


def add_gradient(x: Tensor, term: Tensor | None, scale: Tensor | float) -> Tensor:
    """Add a term's gradient to the backward pass of ``x``; its value is not used.

    Args:
        x: Any tensor that the loss depends on; returned as it is.
        term: ``[]``; None changes nothing.
        scale: What the term's gradient is multiplied by.
    """
    if term is None:
        return x
    scale = scale if isinstance(scale, Tensor) else torch.full_like(term, scale)
    return _AddGradient.apply(x, term, scale.to(term.dtype))


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], ctx.saved_tensors[0], None


def _within_groups(scores: Tensor, groups: int, top_groups: int, router: str) -> Tensor:
    """Keep the scores of the best groups; the others become ``-inf``.

    A group is as good as its two best experts together (DeepSeek-V3), under softmax as its best
    one (DeepSeek-V2).
    """
    grouped = scores.unflatten(-1, (groups, -1))
    best = min(2, grouped.shape[-1]) if router == "sigmoid" else 1
    value = grouped.topk(best, dim=-1).values.sum(-1)
    kept = value.topk(top_groups, dim=-1).indices
    is_out = torch.ones_like(value, dtype=torch.bool).scatter_(-1, kept, value=False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


def _once(kept: dict[str, Tensor], layer: str, make: Callable[[], Tensor]) -> Tensor:
    """Return a layer's value; make it on first use and keep it for backward."""
    if layer in kept:
        return kept[layer]
    made = make()
    if torch.is_grad_enabled():
        kept[layer] = made
    return made
