"""Named optimizers over a model's parameters: AdamW, Lion, Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forgekit.optim import transforms
from forgekit.optim.chain import Chained, chain_optimizers
from forgekit.optim.groups import decay_groups
from forgekit.optim.matrices import AdjustLr, orthogonal
from forgekit.optim.optimizer import Composed, optimizer
from forgekit.optim.transforms import adam, decay, lion_sign, scale


def adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> torch.optim.AdamW | Composed:
    """Build fused AdamW over a model's trainable parameters, with decay groups.

    Rounding to nearest loses updates below 1/512 of a bfloat16 parameter. ``stochastic_rounding``
    rounds up or down at random, without bias and with the same bits in every layout, and needs no
    float32 masters.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        lr: Learning rate until a step's schedule sets it.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; see ``decay_groups`` for what does not decay.
        stochastic_rounding: Whether bfloat16 parameters are rounded stochastically.
        seed: Seed of the rounding.

    Returns:
        A ``torch.optim.AdamW``, 2.5 times as fast on a CPU as the loop over parameters; with
        ``stochastic_rounding`` an optimizer with the same formula.

    Raises:
        ValueError: If a number is out of range, or no parameter is in bfloat16 to be rounded.

    References:
        https://arxiv.org/abs/1711.05101
    """
    groups = decay_groups(model, weight_decay)
    if not stochastic_rounding:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    dtypes = {str(p.dtype).removeprefix("torch.") for group in groups for p in group["params"]}
    if "bfloat16" not in dtypes:
        raise ValueError(
            f"stochastic_rounding=True, and the trainable parameters are {', '.join(dtypes)}; it "
            "is for bfloat16 parameters. Call model.to(torch.bfloat16) before parallelize, whose "
            'precision="bf16" keeps float32 masters, or leave it out.'
        )
    chain = (adam(*betas, eps), decay(weight_decay), transforms.stochastic_rounding(seed))
    return _named("StochasticAdamW", optimizer(model, {"*": chain}, lr=lr))


def lion(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 1.0,
) -> Composed:
    """Build Lion over a model's trainable parameters, with decay groups.

    Every value moves by the learning rate, so rates are 3 to 10 times smaller than AdamW's, and
    the decay as many times larger.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        lr: Learning rate until a step's schedule sets it.
        betas: Weights of the mean gradient, in the sign and in the next mean.
        weight_decay: Decoupled decay of matrices; see ``decay_groups`` for what does not decay.

    Returns:
        An optimizer that skips a bad step on the device.

    References:
        https://arxiv.org/abs/2302.06675
    """
    chain = (lion_sign(*betas), decay(weight_decay))
    return _named("Lion", optimizer(model, {"*": chain}, lr=lr), usual_lr=1e-4)


def muon(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    adjust_lr: AdjustLr = "match_rms_adamw",
    ns_steps: int = 5,
    ns_dtype: torch.dtype = torch.bfloat16,
    roles: Mapping[str, str] | None = None,
    split: Mapping[str, Sequence[int]] | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    rest_lr_scale: float = 1.0,
) -> Chained:
    """Build Muon for a model's matrices and AdamW for everything else, as one optimizer.

    The model's ``roles`` say which parameters are matrices: attention and feed-forward projections
    and stacks of experts. Embeddings, heads, routers, norms and adapters go to fused AdamW, with
    decay as in ``decay_groups``. Sharded matrices are orthogonalised whole, so the result does not
    depend on the layout.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        lr: Learning rate until a step's schedule sets it, of both.
        weight_decay: Decoupled decay of matrices, per unit of learning rate.
        momentum: Decay rate of the mean gradient.
        nesterov: Whether the gradient is mixed in once more before it is orthogonalised.
        adjust_lr: Factor of the learning rate of an ``[o i]`` matrix: ``"match_rms_adamw"`` is
            ``0.2 * sqrt(max(o, i))``, for rates that suit AdamW; ``"original"`` is
            ``sqrt(max(1, o / i))``.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: The dtype of the iteration.
        roles: Patterns of parameter names to roles, for a model without a table:
            ``{"layers.*.weight": "matrix"}``.
        split: Patterns of parameter names to numbers of rows, for fused matrices:
            ``{"*.qkv.weight": (64, 32, 32)}``; each part is orthogonalised separately.
        betas: Decay rates of AdamW's moments.
        eps: Added to the root of AdamW's second moment.
        rest_lr_scale: AdamW's learning rate over that of the matrices: its groups' ``lr_scale``.

    Returns:
        A chain of optimizers: of momentum, ``orthogonal`` and ``decay``, and fused AdamW.

    Raises:
        ValueError: If the model has no table of roles, a pattern matches nothing, or a parameter
            with the role ``"matrix"`` is neither a matrix nor a stack of them.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
        >>> optimizer = muon(model, roles={"1.weight": "matrix"})
        >>> from forgekit.optim import parameters_by_optimizer
        >>> parameters_by_optimizer(model, optimizer)
        {'Muon': ['1.weight'], 'AdamW': ['0.weight', '1.bias']}

    References:
        https://kellerjordan.github.io/posts/muon/; the factor, https://arxiv.org/abs/2502.16982
    """
    matrices = (
        transforms.momentum(momentum, nesterov=nesterov),
        orthogonal(adjust_lr=adjust_lr, steps=ns_steps, dtype=ns_dtype),
        decay(weight_decay, everything=True),
    )
    rest = (adam(*betas, eps), decay(weight_decay), scale(rest_lr_scale))
    chains = {"matrix": matrices, "*": rest}
    return _named(
        "Muon", chain_optimizers(optimizer(model, chains, lr=lr, roles=roles, split=split))
    )


def _named(label: str, made: Any, usual_lr: float = 1e-3) -> Any:
    for member in getattr(made, "members", (made,)):
        if isinstance(member, Composed):
            member.label, member.usual_lr = label, usual_lr
    return made
