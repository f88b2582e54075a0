"""Expert parallelism: each rank of a group holds some of the experts, tokens travel to them.

The ranks that share experts are a view over those that share a sequence and parameters
(``dp_shard * cp``): each brings tokens of its own, so experts need no further rows of data. An
expert's gradient holds the tokens of its whole group; FSDP adds it up over the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from forgekit.inputs import nearest_multiples
from forgekit.mesh import expert_view
from forgekit.model.dispatch import Compute, invert, permute, sort_by_expert
from forgekit.parallel.module_forward import with_local_parameters, wrap_forward


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks of a mesh as experts share them.

    Args:
        mesh: What ``build_mesh`` returned.

    Returns:
        A mesh over the same ranks with the dimensions ``pp, dp_replicate, fsdp_ep, ep, tp``, where
        ``fsdp_ep * ep = dp_shard * cp`` and neighbours share experts; None where ``ep`` is 1.

    Raises:
        ValueError: If ``tp`` is above 1.
    """
    view = expert_view(mesh)
    if view is not None and view["tp"].size() > 1:
        raise ValueError(
            f"ep {view['ep'].size()} with tp {view['tp'].size()}: tokens that ranks compute alike "
            "would travel to the experts several times over. Use tp=1, and dp_shard or cp "
            "instead."
        )
    return view


def find_experts(model: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Find the modules that hold experts.

    Args:
        model: The whole model, before a pipeline splits it.
        patterns: Names, or patterns of names, of modules whose parameters are all ``[e ...]``.

    Returns:
        The modules in order of registration; none inside another.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    patterns = list(patterns)
    named = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            holders = [name for name, module in named.items() if hasattr(module, "dispatch")]
            raise ValueError(
                f"the plan's {pattern!r} matches no module of {type(model).__name__}; the modules "
                f"with a dispatch socket are {holders}."
            )
    found = [name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)]
    inner = {name for name in found for outer in found if name.startswith(f"{outer}.")}
    return [named[name] for name in found if name not in inner]


def apply_experts(
    model: nn.Module, view: DeviceMesh, modules: Iterable[nn.Module]
) -> list[nn.Module]:
    """Shard experts over the ranks of ``ep``, in place.

    Parameters become DTensors sharded by their experts; inside ``forward`` a module sees its own
    experts as plain tensors. The ``dispatch`` socket of the module that owns them, itself or the
    nearest above, exchanges tokens from then on. Nothing is sent: each rank keeps its part of what
    it holds.

    Args:
        model: The model, on meta or filled with the same values on every rank.
        view: What ``expert_mesh`` returned.
        modules: What ``find_experts`` returned; those that a pipeline took out are passed over.

    Returns:
        The modules that are there, for ``shard_experts``.

    Raises:
        ValueError: If experts or their first dimension cannot be shared evenly, a module's
            parameters are not all ``[e ...]``, or nothing above has a ``dispatch`` socket.
    """
    names = {module: name for name, module in model.named_modules()}
    present = [module for module in modules if module in names]
    exchange = partial(_dispatch_over, view["ep"].get_group())
    for module in present:
        _check_experts(module, names[module], view)
        owner = _owner(model, names[module])
        _cut(module, view["ep"])
        owner.dispatch = exchange
        wrap_forward(module, partial(_with_own_experts, module))
    return present


def _check_experts(module: nn.Module, name: str, view: DeviceMesh) -> None:
    shapes = {leaf: tuple(p.shape) for leaf, p in module.named_parameters()}
    leading = {shape[:1] for shape in shapes.values()}
    linear = [leaf for leaf, m in module.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    if len(leading) != 1 or linear or any(len(shape) < 2 for shape in shapes.values()):
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has the parameters {shapes}"
            f"{f' and the layers {linear}' if linear else ''}; style 'expert' is for a module "
            "whose parameters are all [e ...] with the same number e of experts. Keep the router "
            "outside of it."
        )
    experts, ep, rest = next(iter(leading))[0], view["ep"].size(), view["fsdp_ep"].size()
    if experts % ep:
        raise ValueError(
            f"{name!r} has {experts} experts, which ep {ep} must divide; the nearest are "
            f"{nearest_multiples(experts, ep)}."
        )
    for leaf, shape in shapes.items():
        if shape[1] % rest:
            raise ValueError(
                f"'{name}.{leaf}' is {shape}; dp_shard * cp / ep = {rest} must divide its second "
                f"dimension, the nearest are {nearest_multiples(shape[1], rest)}. Or raise ep."
            )


def _owner(model: nn.Module, name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if hasattr(module, "dispatch"):
            return module
    raise ValueError(
        f"neither {name!r} nor a module above it has a `dispatch` socket, so its tokens could not "
        "reach other ranks. Call self.dispatch(tokens, expert_ids, experts, compute), which is "
        "forgekit.model.dispatch_local at first."
    )


def _cut(module: nn.Module, ranks: DeviceMesh) -> None:
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                own = distribute_tensor(parameter.detach(), ranks, [Shard(0)], src_data_rank=None)
                part._parameters[leaf] = nn.Parameter(own, requires_grad=parameter.requires_grad)


@torch.compiler.disable(recursive=False)
def _with_own_experts(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward with its parameters as the plain tensors that this rank holds."""
    return with_local_parameters(list(module.modules()), Shard(0), forward, *args, **kwargs)


def _dispatch_over(
    group: dist.ProcessGroup, tokens: Tensor, expert_ids: Tensor, experts: int, compute: Compute
) -> Tensor:
    """Compute each token with its expert on the rank that holds it; see ``dispatch_local``.

    Three exchanges: how many tokens, the tokens, and what became of them. The host has to know
    how many to expect, so on an accelerator it waits for the first: one read per call. A rank
    without tokens, or whose experts get none, takes part in all of them. Tokens of no expert stay
    where they are, and zeros come back for them.
    """
    ranks = dist.get_world_size(group)
    order, counts = sort_by_expert(expert_ids, experts)
    arriving, sent, received = _splits(counts.view(ranks, -1), group)
    inverse, left = invert(order), len(order) - sum(sent)
    tokens = _travel(permute(tokens, order, inverse)[: sum(sent)], sent, received, group)
    # They arrive by rank and expert; experts want them by expert and rank.
    own = torch.arange(arriving.shape[1], device=counts.device).repeat(ranks)
    ids = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
    by_expert = torch.sort(ids, stable=True).indices
    by_rank = invert(by_expert)
    computed = compute(permute(tokens, by_expert, by_rank), arriving.sum(0))
    back = _travel(permute(computed, by_rank, by_expert), received, sent, group)
    return permute(F.pad(back, (0, 0, 0, left)) if left else back, inverse, order)


@torch.compiler.disable()
def _splits(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
    """What each rank is about to send to this one's experts.

    Args:
        counts: ``[p e/p]`` int64: this rank's tokens by rank and expert.
        group: The ``p`` ranks.

    Returns:
        ``[p e/p]`` int64: tokens from each rank for each of this rank's experts; how many tokens go
        to each rank; how many come from each.
    """
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts.contiguous(), group=group)
    sent, received = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
    return arriving, sent, received


@torch.compiler.disable()
def _travel(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[p]`` rows to each rank ``p`` and receive ``received[p]`` from it."""
    return _Exchange.apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    """Rows of each rank to each rank; backward sends gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, group = ctx.splits
        return _exchange(gradients[0], received, sent, group), None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
