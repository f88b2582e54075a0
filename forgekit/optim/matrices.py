"""Transforms of whole matrices: orthogonal directions, row norms, SOAP, factored moments.

Written as for one process: each matrix and its state are whole on the rank that owns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from forgekit.checks import check_choice, check_integers, check_numbers
from forgekit.optim.transforms import (
    At,
    State,
    Tensors,
    Transform,
    check_decay_rates,
    transform,
)
from forgekit.tensors import wide

AdjustLr = Literal["match_rms_adamw", "original", "none"]
Coefficients = Literal["newton_schulz", "polar_express"]

EPS = 1e-7

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),)
"""A quintic whose slope at zero is steep: singular values end between 0.7 and 1.2."""
_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# Each is narrowed by 1.01, so that rounding pushes no singular value out of its interval.
POLAR_EXPRESS = (
    *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _EXPRESS),
    (1.875, -1.25, 0.375),
)
"""The optimal quintic of each iteration; later ones repeat the last."""
_SCHEDULES = {"newton_schulz": NEWTON_SCHULZ, "polar_express": POLAR_EXPRESS}

FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda o, i: 0.2 * math.sqrt(max(o, i)),
    "original": lambda o, i: math.sqrt(max(1.0, o / i)),
    "none": lambda o, i: 1.0,  # noqa: ARG005
}
"""The factor of the direction of an ``[o i]`` matrix."""


def orthogonal(
    *,
    coefficients: Coefficients = "newton_schulz",
    steps: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    adjust_lr: AdjustLr = "match_rms_adamw",
) -> Transform:
    """Orthogonalize ``x = d / |d|`` by ``x <- a x + b x x' x + c (x x')**2 x``, times a factor.

    Args:
        coefficients: ``a, b, c``, the same for all iterations or optimal for each.
        steps: Iterations.
        dtype: The dtype of the iteration, and of directions sent between ranks.
        adjust_lr: The factor of an ``[o i]`` matrix, see ``fk.muon``; ``"none"`` is 1.

    References:
        https://kellerjordan.github.io/posts/muon/; Polar Express, https://arxiv.org/abs/2505.16932
    """
    check_integers(steps=(steps, 1))
    check_choice("coefficients", coefficients, _SCHEDULES)
    check_choice("adjust_lr", adjust_lr, FACTORS)
    factor, schedule = FACTORS[adjust_lr], _SCHEDULES[coefficients]

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        stacked = torch.stack([x.to(dtype) for x in d])
        return orthogonalize(stacked, schedule, steps, factor(*d[0].shape)).unbind(), state

    return transform(apply, whole=True, name="orthogonal", dtype=dtype)


def orthogonalize(
    matrices: Tensor, schedule: Sequence[tuple[float, float, float]], steps: int, scale: float
) -> Tensor:
    """Bring each matrix's singular values near 1, and multiply it by a scale.

    Args:
        matrices: ``[n o i]``, in the dtype of the iteration.
        schedule: Coefficients of each iteration; later ones repeat the last.
        steps: Iterations.
        scale: The scale.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide(x.dtype))
    x = x / (norm * (1.01 if len(schedule) > 1 else 1.0)).clamp(min=EPS).to(x.dtype)
    for step in range(steps):
        a, b, c = schedule[min(step, len(schedule) - 1)]
        last = scale if step == steps - 1 else 1.0
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a * last, alpha=last)
    return x.mT if is_tall else x


def row_norm(beta2: float = 0.95, eps: float = 1e-8) -> Transform:
    """Divide each row by the root of its running mean square ``v``: NorMuon, after ``orthogonal``.

    ``v <- b2 v + (1 - b2) mean(d * d)`` by row, ``x = d / (sqrt(v) + eps)``, and the direction is
    ``0.2 sqrt(o i) x / |x|``, as large as AdamW's.

    Args:
        beta2: Decay rate of ``v``.
        eps: Added to the root.

    References:
        https://arxiv.org/abs/2510.05491
    """
    check_decay_rates(beta2)

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:  # noqa: ARG001
        (o, i), old = d[0].shape, torch.stack(state["row_sq"])
        x = torch.stack(d).to(old.dtype)
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # Mean squares of the orthogonal matrix without its factor: eps is relative to them.
        means = norms.square().mul_(FACTORS["match_rms_adamw"](o, i) ** -2 / i)
        v = old.lerp(means, 1 - beta2)
        scales = 1 / (v.sqrt() + eps)
        sizes = torch.linalg.vector_norm(norms * scales, dim=-2, keepdim=True)
        scales *= 0.2 * math.sqrt(o * i) / sizes.clamp(min=EPS)
        return x.mul_(scales).unbind(), {"row_sq": v.unbind()}

    return transform(apply, {"row_sq": _per_row}, whole=True, name="row_norm")


def _per_row(matrix: Tensor) -> Tensor:
    return torch.zeros_like(matrix[:, :1])


def soap(
    beta1: float = 0.95, beta2: float = 0.95, *, eps: float = 1e-8, every: int = 10
) -> Transform:
    """Adam in the eigenbases ``p, q`` of the means ``l`` of ``d d'`` and ``r`` of ``d' d``.

    ``m <- b1 m + (1 - b1) d``, ``v <- b2 v + (1 - b2) (p' d q)**2``; the direction is
    ``p (c1 p' m q / (sqrt(c2 v) + eps)) q'``, ``c1`` and ``c2`` Adam's corrections. Every
    ``every``-th step of the run updates the bases for the next step by one power iteration,
    ``p <- qr(l p)``. They start as the identity. The published code starts with eigenvectors of the
    first gradients, which update nothing, and sorts bases by eigenvalue before each ``qr``.

    Args:
        beta1: Decay rate of ``m``.
        beta2: Decay rate of ``v``, ``l`` and ``r``.
        eps: Added to the root.
        every: Steps between two updates of the bases.

    References:
        https://arxiv.org/abs/2409.11321
    """
    check_decay_rates(beta1, beta2)
    check_integers(every=(every, 1))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        g, old = torch.stack(d), {name: torch.stack(entry) for name, entry in state.items()}
        left, right = old["left"].lerp(g @ g.mT, 1 - beta2), old["right"].lerp(g.mT @ g, 1 - beta2)
        p, q, m = old["left_basis"], old["right_basis"], old["exp_avg"].lerp(g, 1 - beta1)
        v = old["exp_avg_sq"].lerp((p.mT @ g @ q).square(), 1 - beta2)
        c1, c2 = (1 - beta1**at.step).to(g), (1 - beta2**at.step).to(g)
        x = p @ ((p.mT @ m @ q / c1) / ((v / c2).sqrt() + eps)) @ q.mT
        if at.every(every):
            p, q = (torch.linalg.qr(a @ b)[0] for a, b in ((left, p), (right, q)))
        new = {"left": left, "right": right, "left_basis": p, "right_basis": q}
        new |= {"exp_avg": m, "exp_avg_sq": v}
        return x.unbind(), {name: entry.unbind() for name, entry in new.items()}

    state = {"left": lambda w: w @ w.mT, "right": lambda w: w.mT @ w}  # zeros
    state |= {"left_basis": lambda w: torch.eye(w.shape[0]).to(w)}
    state |= {"right_basis": lambda w: torch.eye(w.shape[1]).to(w)}
    state |= {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like}
    return transform(apply, state, whole=True, name="soap")


def adafactor(power: float = 0.8, *, eps: float = 1e-30, most: float = 1.0) -> Transform:
    """``d / sqrt(r c / mean(r))`` with ``r, c`` the means of squares by row and by column.

    ``r <- b r + (1 - b) mean(d * d + eps)`` with ``b = 1 - t**-power``, ``c`` alike; a direction
    whose root mean square exceeds ``most`` is scaled down to it.

    Args:
        power: How fast ``b`` rises.
        eps: Added to the squares.
        most: Upper bound of the root mean square.

    References:
        https://arxiv.org/abs/1804.04235
    """
    check_numbers(power=(power, 0), most=(most, 0))

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        g, share = torch.stack(d), at.step**-power
        squares = g.square() + eps
        old = (torch.stack(state[name]) for name in ("row_sq", "column_sq"))
        new = (squares.mean(dim, keepdim=True) for dim in (-1, -2))
        r, c = (a.lerp(b, share.to(a)) for a, b in zip(old, new, strict=True))
        x = g / (r * c / r.mean(-2, keepdim=True)).sqrt()
        x = x / (x.square().mean((-2, -1), keepdim=True).sqrt() / most).clamp(min=1)
        return x.unbind(), {"row_sq": r.unbind(), "column_sq": c.unbind()}

    state = {"row_sq": _per_row, "column_sq": lambda w: torch.zeros_like(w[:1])}
    return transform(apply, state, whole=True, name="adafactor")
