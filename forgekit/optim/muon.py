"""Muon: momentum whose singular values are made equal, for the matrices of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forgekit.checks import check_integers
from forgekit.optim import transforms
from forgekit.optim.chain import Chained, chain_optimizers
from forgekit.optim.groups import check_decay_rates, check_patterns, decay_groups, roles_of
from forgekit.optim.matrices import AdjustLr, orthogonal
from forgekit.optim.step_chain import step_chain
from forgekit.optim.transforms import Transform


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
) -> Chained:
    """Build Muon for a model's matrices and AdamW for all else, as one optimizer.

    Which parameters are matrices is said by the model's ``roles``: attention and feed-forward
    projections and stacks of experts. Embeddings, heads, routers, norms and adapters go to fused
    AdamW, with decay as in ``decay_groups``. Matrices that ranks share are orthogonalised whole:
    the result does not depend on the layout.

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
        split: Patterns of parameter names to numbers of rows, for matrices that hold several:
            ``{"*.qkv.weight": (64, 32, 32)}``; each is orthogonalised by itself.
        betas: Decay rates of AdamW's moments.
        eps: Added to the root of AdamW's second moment.

    Returns:
        A chain of ``Muon`` and ``torch.optim.AdamW``.

    Raises:
        ValueError: If the model has no table of roles, a pattern matches nothing, or what has the
            role of a matrix is neither one nor a stack of them.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
        >>> optimizer = muon(model, roles={"1.weight": "matrix"})
        >>> [type(member).__name__ for member in optimizer.members]
        ['Muon', 'AdamW']

    References:
        https://kellerjordan.github.io/posts/muon/; the factor, https://arxiv.org/abs/2502.16982
    """
    check_patterns("split", model, split or ())
    matrices: list[nn.Parameter] = []
    groups: dict[tuple[int, ...] | None, list[nn.Parameter]] = {}
    for name, role in roles_of(model, roles).items():
        if role == "matrix":
            matrices.append(parameter := model.get_parameter(name))
            _check_matrix(name, parameter)
            rows = next((tuple(r) for p, r in (split or {}).items() if fnmatchcase(name, p)), None)
            groups.setdefault(rows, []).append(parameter)
    by_rows = [{"params": parameters, "rows": rows} for rows, parameters in groups.items()]
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr}
    options |= {"ns_steps": ns_steps, "ns_dtype": ns_dtype}
    of_matrices = Muon(by_rows, lr=lr, weight_decay=weight_decay, **options)
    rest = decay_groups(model, weight_decay, without=matrices)
    return chain_optimizers(
        of_matrices, torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps, fused=True)
    )


class Muon(Optimizer):
    """Muon over matrices ``[o i]`` and stacks of them ``[e o i]``, sharded in any way.

    Matrices of one shape are iterated at once, and shared among the ranks. It takes
    ``grad_scale`` and ``found_inf``, so that a bad step is skipped on the device.

    Args:
        params: Parameters or groups; a group's ``rows`` splits its matrices, see ``muon``.
        lr: Learning rate.
        weight_decay: See ``muon``, as all that follow.
        momentum: Decay rate of the mean gradient.
        nesterov: Whether the gradient is mixed in once more.
        adjust_lr: Factor of the learning rate.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: The dtype of the iteration.

    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: AdjustLr = "match_rms_adamw",
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_decay_rates(momentum)
        check_integers(ns_steps=(ns_steps, 1))
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rows": None}
        defaults |= {"nesterov": nesterov, "adjust_lr": adjust_lr}
        defaults |= {"ns_steps": ns_steps, "ns_dtype": ns_dtype}
        super().__init__(params, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all matrices, those of one shape and layout at once; all ranks call it.

        Args:
            closure: Computes the loss again; called once.

        Returns:
            What the closure returned, else None.
        """
        return step_chain(self, _chain_of, closure)


def _chain_of(group: dict[str, Any]) -> tuple[Transform, ...]:
    options = {"steps": group["ns_steps"], "dtype": group["ns_dtype"]}
    return (
        transforms.momentum(group["momentum"], nesterov=group["nesterov"]),
        orthogonal(adjust_lr=group["adjust_lr"], **options),
        transforms.decay(group["weight_decay"]),
    )


def _check_matrix(name: str, parameter: nn.Parameter) -> None:
    if parameter.ndim not in (2, 3):
        raise ValueError(
            f"{name!r} has the role 'matrix' and the shape {tuple(parameter.shape)}; Muon takes "
            "matrices [o i] and stacks of them [e o i]. Give it another role."
        )
