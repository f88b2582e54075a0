"""AdamW in its fused form, which takes a step's factor and skip inside its kernel."""

from __future__ import annotations

import torch
from torch import nn

from forgekit.inputs import check_integers, check_numbers
from forgekit.optim.parameter_groups import check_betas, decay_groups
from forgekit.optim.stochastic_adamw import StochasticAdamW


def adamw(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> torch.optim.AdamW | StochasticAdamW:
    """Build fused AdamW over a model's trainable parameters, with decay groups.

    Parameters in bfloat16 lose updates below 1/512 of their size where they are rounded to
    nearest. With ``stochastic_rounding`` they are rounded up or down at random, with the right
    mean and the same bits in every layout, and need no float32 masters.

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
        ValueError: If a number is out of range, or no parameter is there to be rounded.

    References:
        https://arxiv.org/abs/1711.05101
    """
    check_numbers(lr=(lr, 0), eps=(eps, 0))
    check_betas(betas)
    check_integers(seed=(seed, -(2**63)))
    groups = decay_groups(model, weight_decay)
    if not stochastic_rounding:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    names = {p: name for name, p in model.named_parameters()}
    _check_rounded(names)
    return StochasticAdamW(groups, names, lr=lr, betas=betas, eps=eps, seed=seed)


def _check_rounded(names: dict[nn.Parameter, str]) -> None:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in names if p.requires_grad}
    if "bfloat16" not in dtypes:
        raise ValueError(
            f"stochastic_rounding=True, and the trainable parameters are {', '.join(dtypes)}; it "
            "is for bfloat16 parameters. Call model.to(torch.bfloat16) before parallelize, whose "
            'precision="bf16" keeps float32 masters, or leave it out.'
        )
