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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

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
    """
    return expert_view(mesh)


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

    Parameters become DTensors sharded by their experts, ``ceil(e / ep)`` to a rank as long as there
    are some, and beside ``tp`` by their widths too. Inside ``forward`` a module sees its own
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
        ValueError: If a dimension cannot be shared evenly, a module's parameters are not all
            ``[e ...]``, nothing above has a ``dispatch`` socket, or tensor-parallel ranks have no
            parts of the experts.
    """
    names = {module: name for name, module in model.named_modules()}
    present = [module for module in modules if module in names]
    exchange = partial(_dispatch_over, view["ep"].get_group())
    for module in present:
        _check_experts(module, names[module], view)
        owner = _owner(model, names[module])
        _cut(module, view)
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
    tensor, rest = view["tp"].size(), view["fsdp_ep"].size()
    if tensor > 1 and not all(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            f"{name!r} computes the same on all ranks of tp {tensor}, so with ep "
            f"{view['ep'].size()} its tokens would travel {tensor} times over. Give the layer "
            "above it the style 'routed', or use tp=1 and more of dp_shard or cp."
        )
    for leaf, parameter in module.named_parameters():
        rows = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape[1]
        if rows % rest:
            raise ValueError(
                f"'{name}.{leaf}' is {shapes[leaf]}; dp_shard * cp / ep = {rest} must divide its "
                f"second dimension{f' / tp = {rows}' if rows != shapes[leaf][1] else ''}, "
                f"{nearest_multiples(rows, rest)}. Or raise ep."
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


def _cut(module: nn.Module, view: DeviceMesh) -> None:
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                own = _own_experts(parameter.detach(), view)
                part._parameters[leaf] = nn.Parameter(own, requires_grad=parameter.requires_grad)


def _own_experts(parameter: Tensor, view: DeviceMesh) -> DTensor:
    """This rank's experts; of a parameter that tp has sharded, this rank's part of them."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    own = distribute_tensor(local, view["ep"], [Shard(0)], src_data_rank=None)
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own.to_local(),
        view["ep", "tp"],
        (Shard(0), *parameter.placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.compiler.disable(recursive=False)
def _with_own_experts(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward with its parameters as the plain tensors that this rank holds."""
    return with_local_parameters(list(module.modules()), None, forward, *args, **kwargs)


def _dispatch_over(
    group: dist.ProcessGroup,
    tokens: Tensor,
    expert_ids: Tensor,
    experts: int,
    compute: Compute,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Compute each token with its expert on the rank that holds it; see ``dispatch_local``.

    Three exchanges: how many tokens, the tokens, and what became of them. The host has to know
    how many to expect, so on an accelerator it waits for the first: one read per call. A rank
    without tokens, or whose experts get none, takes part in all of them. Tokens of no expert stay
    where they are, and zeros come back for them. ``meanwhile`` runs once tokens are on their way,
    and its backward while their gradients are.
    """
    ranks = dist.get_world_size(group)
    order, counts = sort_by_expert(expert_ids, experts)
    each = -(-experts // ranks)  # the last ranks may hold fewer, or none
    counts = F.pad(counts, (0, each * ranks - experts)).view(ranks, each)
    arriving, sent, received = _splits(counts, group)
    held = min(each, max(experts - dist.get_rank(group) * each, 0))
    inverse, left = invert(order), len(order) - sum(sent)
    leaving = permute(tokens, order, inverse)[: sum(sent)]
    under_way = _leave(leaving, sent, received, group)
    if meanwhile is not None:
        meanwhile()
    tokens = _arrive(*under_way)
    # They arrive by rank and expert; experts want them by expert and rank.
    own = torch.arange(arriving.shape[1], device=counts.device).repeat(ranks)
    ids = own.repeat_interleave(arriving.flatten(), output_size=sum(received))
    by_expert = torch.sort(ids, stable=True).indices
    by_rank = invert(by_expert)
    # A rank without experts gets no tokens; it takes part in the exchanges and computes nothing.
    ordered = permute(tokens, by_expert, by_rank)
    computed = compute(ordered, arriving.sum(0)[:held]) if held else ordered
    back = _arrive(*_leave(permute(computed, by_rank, by_expert), received, sent, group))
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
def _leave(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, _Exchange]:
    """Send ``sent[p]`` rows to each rank ``p`` and expect ``received[p]`` from it."""
    exchange = _Exchange(sent, received, group)
    return _Leave.apply(rows, exchange), exchange


@torch.compiler.disable()
def _arrive(arriving: Tensor, exchange: _Exchange) -> Tensor:
    """Wait for the rows that ``_leave`` expects."""
    return _Arrive.apply(arriving, exchange)


class _Exchange:
    """Rows of each rank on their way to each rank, and later their gradients on the way back."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self.splits = sent, received
        self.group = group
        self.under_way: list[Any] = []

    def start(self, rows: Tensor, *, back: bool) -> Tensor:
        """Send rows; what is returned must not be read before ``finish``."""
        sent, received = self.splits[::-1] if back else self.splits
        rows = rows.contiguous()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(
            arrived, rows, received, sent, group=self.group, async_op=True
        )
        self.under_way = [work, arrived, rows]  # rows must outlive the exchange
        return arrived

    def finish(self) -> Tensor:
        """Wait for what was sent; on an accelerator its stream does, not the host."""
        work, arrived, _ = self.under_way
        work.wait()
        self.under_way = []
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, back=False)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.finish(), None  # what comes in is only there for its shape


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange.start(gradients[0], back=True)
        return gradients[0], None
