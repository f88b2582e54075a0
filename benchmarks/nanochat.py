"""nanochat's model, optimizer and schedules as a plain loop, written from what it publishes.

https://github.com/karpathy/nanochat, ``scripts/base_train.py`` at commit 00255c1 (rates, schedules)
and ``nanochat/gpt.py``, ``nanochat/optim.py`` of 2026 (model, first values, groups), at its
reference rates. Its rule for small batches divides them by 16 here, which learns more slowly. Left
out: FP8, sliding windows and what starts at zero (smear, backout).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Polar Express, five iterations, https://arxiv.org/abs/2505.16932.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
GATED = 12
"""Channels that a gate of value embeddings reads."""


def norm(x: Tensor) -> Tensor:
    """RMS norm without weights."""
    return F.rms_norm(x, (x.size(-1),))


class Model(nn.Module):
    """Rotary attention with normed queries and keys, squared ReLU, value embeddings, own head."""

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, bound = heads, (3 / dim) ** 0.5

        def uniform(*shape: int, bound: float = bound) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        depth = torch.linspace(0, 1, layers)
        self.embedding = nn.Parameter(0.8 * torch.randn(vocab, dim))
        self.head = nn.Parameter(0.001 * torch.randn(vocab, dim))
        self.residual = nn.Parameter(1.15 - 0.10 * depth)
        self.skip = nn.Parameter(0.20 - 0.15 * depth)
        has_values = [layer % 2 == (layers - 1) % 2 for layer in range(layers)]
        self.values = nn.ParameterList([uniform(vocab, dim) for has in has_values if has])
        self.slot = [
            sum(has_values[:layer]) if has else None for layer, has in enumerate(has_values)
        ]
        self.matrices = nn.ModuleList(
            nn.ParameterDict(
                {
                    **{name: uniform(dim, dim) for name in ("query", "key", "value")},
                    "output": nn.Parameter(torch.zeros(dim, dim)),
                    "up": uniform(4 * dim, dim, bound=0.4 * bound),
                    "down": nn.Parameter(torch.zeros(dim, 4 * dim)),
                    **({"gate": nn.Parameter(torch.rand(heads, GATED) / 50)} if has else {}),
                }
            )
            for has in has_values
        )
        channels = torch.arange(0, dim // heads, 2) / (dim // heads)
        angles = torch.outer(torch.arange(length), 100_000.0**-channels)[None, :, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``[b s v]``."""
        x = first = norm(F.embedding(ids, self.embedding))
        for layer, w in enumerate(self.matrices):
            x = self.residual[layer] * x + self.skip[layer] * first
            x = x + self._attend(norm(x), ids, w, self.slot[layer])
            x = x + F.linear(F.linear(norm(x), w["up"]).relu().square(), w["down"])
        return 15 * torch.tanh(F.linear(norm(x), self.head) / 15)

    def _attend(self, x: Tensor, ids: Tensor, w: nn.ParameterDict, slot: int | None) -> Tensor:
        shape = (*ids.shape, self.heads, -1)
        query, key, value = (F.linear(x, w[n]).view(shape) for n in ("query", "key", "value"))
        if slot is not None:
            gate = 3 * torch.sigmoid(F.linear(x[..., :GATED], w["gate"]))
            value = value + gate[..., None] * F.embedding(ids, self.values[slot]).view(shape)
        query, key = (1.2 * norm(self._rotate(one)) for one in (query, key))
        heads_first = (one.transpose(1, 2) for one in (query, key, value))
        y = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), w["output"])

    def _rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[:, : x.size(1)], self.sin[:, : x.size(1)]
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def build_update(model: Model, dim: int, steps: int) -> Callable[[int], None]:
    """Return what updates the model from its gradients, given the number of the step."""
    narrow = (dim / 768) ** -0.5
    groups = [
        {"params": [model.head], "lr": 0.008 * narrow, "betas": (0.8, 0.96), "weight_decay": 0.01},
        {"params": [model.embedding], "lr": 0.3 * narrow, "weight_decay": 0.001},
        {"params": [*model.values], "lr": 0.15 * narrow, "weight_decay": 0.01},
        {"params": [model.residual], "lr": 0.005, "betas": (0.8, 0.95), "weight_decay": 0.05},
        {"params": [model.skip], "lr": 0.5, "betas": (0.96, 0.95), "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.995), eps=1e-10, fused=True)
    peaks = [group["lr"] for group in adam.param_groups]
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in model.matrices.parameters():
        by_shape.setdefault(parameter.shape, []).append(parameter)
    means = {shape: torch.zeros(len(p), *shape) for shape, p in by_shape.items()}
    squares: dict[torch.Size, Tensor] = {}
    falls = round(0.65 * steps)

    @torch.no_grad()
    def update(step: int) -> None:
        left = min(1.0, (steps - step) / falls)
        share = (step + 1) / 40 if step < 40 else 0.05 + 0.95 * left
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.90 + 0.07 * left
        decay = 0.14 * (1 + math.cos(math.pi * step / steps))
        for group, peak in zip(adam.param_groups, peaks, strict=True):
            group["lr"] = share * peak
        adam.step()
        for shape, parameters in by_shape.items():
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            mean = means[shape].lerp_(gradients, 1 - momentum)
            x = _orthogonal(gradients.lerp(mean, momentum))
            along = -1 if shape[0] >= shape[1] else -2
            square = x.square().mean(along, keepdim=True)
            kept = squares.setdefault(shape, torch.zeros_like(square)).lerp_(square, 0.1)
            scaled = x * kept.clamp_min(1e-10).rsqrt()
            size = scaled.norm(dim=(1, 2), keepdim=True).clamp_min(1e-10)
            scaled *= x.norm(dim=(1, 2), keepdim=True) / size
            rate = 0.02 * share * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, direction in zip(parameters, scaled, strict=True):
                moves_along = direction * parameter >= 0
                parameter.sub_(rate * (direction + decay * parameter * moves_along))
        model.zero_grad()

    return update


def _orthogonal(x: Tensor) -> Tensor:
    x = x / (1.01 * x.norm(dim=(1, 2), keepdim=True) + 1e-6)
    is_tall = x.size(1) > x.size(2)
    x = x.mT if is_tall else x
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
