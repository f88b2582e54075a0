"""Expert parallelism: each rank of a group holds some experts; tokens are sent to them.

The ranks that share experts are a view over those that share a sequence and parameters
(``dp_shard * cp``): each brings tokens of its own, so experts need no further rows of data. An
expert's gradient holds the tokens of its whole group; FSDP adds it up over the groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forgekit.model.moe import Compute, invert, permute, sort_by_expert
from forgekit.parallel.layout import EXPERT, match_plan
from forgekit.parallel.module_forward import with_local_parameters, wrap_forward


def find_experts(model: nn.Module, plan: Mapping[str, Any] | None) -> list[nn.Module]:
    """Find the modules that hold experts.

    Args:
        model: The whole model, before a pipeline splits it.
        plan: Names, or patterns of names, to styles; those of ``"expert"`` are modules whose
            parameters are all ``[e ...]``. The model's own plan if None.

    Returns:
        The modules in order of registration; none inside another.

    Raises:
        ValueError: If nothing has the style, or a pattern matches nothing.
    """
    plan = getattr(model, "plan", None) if plan is None else plan
    named = {pattern: style for pattern, style in (plan or {}).items() if style == EXPERT}
    if not named:
        raise ValueError(
            f"ep is above 1, but no plan names the experts of {type(model).__name__}; pass "
            f"plan={{'layers.*.experts': '{EXPERT}'}}, or set ep to 1."
        )
    matched = match_plan(model, named)
    inner = {name for name in matched for outer in matched if name.startswith(f"{outer}.")}
    return [m for name, m in model.named_modules() if name in matched and name not in inner]


def apply_experts(model: nn.Module, view: DeviceMesh | None, modules: Iterable[nn.Module]) -> None:
    """Shard experts over the ranks of ``ep``, in place.

    Parameters become DTensors sharded by their experts, ``ceil(e / ep)`` to a rank and fewer on the
    last, and beside ``tp`` by their widths too. Inside ``forward`` a module sees this rank's
    experts as plain tensors. The ``dispatch`` socket of the module that owns them, itself or the
    nearest above, exchanges tokens from then on. Nothing is sent: each rank keeps its part of what
    it holds.

    Args:
        model: The model, on meta or filled with the same values on every rank.
        view: What ``expert_view`` returned; with None nothing happens.
        modules: What ``find_experts`` returned, without those that a pipeline took out.

    Raises:
        ValueError: If a rank would have no expert, a module's parameters are not all ``[e ...]``,
            nothing above has a ``dispatch`` socket, or tensor-parallel ranks have no parts of the
            experts.
    """
    if view is None:
        return
    names = {module: name for name, module in model.named_modules()}
    exchange = partial(_dispatch_over, view["ep"].get_group())
    for module in modules:
        _check_experts(module, names[module], view)
        _owner(model, names[module]).dispatch = exchange
        for part in module.modules():
            for leaf, parameter in part.named_parameters(recurse=False):
                held = _experts_here(parameter.detach(), view)
                part._parameters[leaf] = nn.Parameter(held, requires_grad=parameter.requires_grad)
        wrap_forward(module, partial(_with_experts_here, module))


def _check_experts(module: nn.Module, name: str, view: DeviceMesh) -> None:
    shapes = {leaf: tuple(p.shape) for leaf, p in module.named_parameters()}
    leading = {shape[0] if len(shape) > 1 else 0 for shape in shapes.values()}
    is_matrix = any(isinstance(m, nn.Linear | nn.Embedding) for m in module.modules())
    if len(leading) != 1 or is_matrix or 0 in leading:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has the parameters {shapes}; style 'expert' is "
            "for modules whose parameters are all [e ...]. Keep the router outside of it."
        )
    tensor, ranks, experts = view["tp"].size(), view["ep"].size(), leading.pop()
    if tensor > 1 and not all(isinstance(p, DTensor) for p in module.parameters()):
        raise ValueError(
            f"{name!r} computes the same on all ranks of tp {tensor}, so with ep {ranks} its "
            f"tokens would travel {tensor} times over. Give the layer above it the style 'routed'."
        )
    each = math.ceil(experts / ranks)
    if each * (ranks - 1) >= experts:
        raise ValueError(
            f"{name!r} has {experts} experts, {each} to a rank, so some of the {ranks} ranks of "
            f"ep would have none; use at most ep={math.ceil(experts / each)}."
        )


def _owner(model: nn.Module, name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if hasattr(module, "dispatch"):
            return module
    raise ValueError(
        f"neither {name!r} nor a module above it has a `dispatch` socket, so its tokens could not "
        "reach other ranks. Call self.dispatch, which is forgekit.model.dispatch_local at first."
    )


def _experts_here(parameter: Tensor, view: DeviceMesh) -> DTensor:
    """Return this rank's experts of a parameter, as sharded by tp if it is."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    held = distribute_tensor(local, view["ep"], [Shard(0)], src_data_rank=None)
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held.to_local(),
        view["ep", "tp"],
        (Shard(0), *parameter.placements),
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.compiler.disable(recursive=False)
def _with_experts_here(
    module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module's forward with its parameters replaced by this rank's plain tensors."""
    return with_local_parameters(list(module.modules()), None, forward, *args, **kwargs)


def _dispatch_over(
    group: dist.ProcessGroup,
    tokens: Tensor,
    expert_ids: Tensor,
    experts: int,
    compute: Compute,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Send each token to its expert's rank, compute, and send results back.

    Three exchanges: counts, tokens, results. The host must know the counts, so on an accelerator
    it waits for the first: one read per call. A rank
    without tokens, or whose experts get none, takes part in all of them. Tokens of no expert stay
    where they are, and zeros come back for them. ``meanwhile`` runs once tokens are on their way,
    and its backward while their gradients are.
    """
    ranks = dist.get_world_size(group)
    order, counts = sort_by_expert(expert_ids, experts)
    each = math.ceil(experts / ranks)  # the last rank may hold fewer
    # Padding experts after the last rank's get no tokens.
    counts = F.pad(counts, (0, each * ranks - experts)).view(ranks, each)
    arriving, sent, received = _splits(counts, group)
    held = min(each, experts - dist.get_rank(group) * each)
    # Tokens without an expert are sorted last and stay.
    inverse, left = invert(order), len(order) - sum(sent)
    leaving = permute(tokens, order, inverse)[: sum(sent)]
    # First exchange: rows to their experts' ranks.
    there = _Exchange(sent, received, group)
    under_way = there.leave(leaving)
    if meanwhile is not None:
        meanwhile()
    tokens = there.arrive(under_way)
    # They arrive by rank and expert; experts need them by expert and rank.
    numbers = torch.arange(each, device=counts.device).repeat(ranks)
    ids = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received))
    by_expert = torch.sort(ids, stable=True).indices
    by_rank = invert(by_expert)
    computed = compute(permute(tokens, by_expert, by_rank), arriving.sum(0)[:held])
    # Second exchange: back, with the sizes swapped.
    home = _Exchange(received, sent, group)
    back = home.arrive(home.leave(permute(computed, by_rank, by_expert)))
    return permute(F.pad(back, (0, 0, 0, left)) if left else back, inverse, order)


@torch.compiler.disable()
def _splits(counts: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int], list[int]]:
    """Exchange the number of tokens that each rank sends to this one's experts.

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


@attrs.define(eq=False)
class _Exchange:
    """An exchange of rows with other ranks, and of their gradients in backward.

    Torch's functional all-to-all waits for the gradients at once; here they are sent while
    the backward pass of ``meanwhile`` computes.

    Attributes:
        sent: Rows that go to each rank.
        received: Rows that come from each.
        group: The ranks.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    _under_way: tuple[Any, ...] = ()

    @torch.compiler.disable()
    def leave(self, rows: Tensor) -> Tensor:
        """Start sending rows; the result must not be read before ``arrive``."""
        return _Leave.apply(rows, self)

    @torch.compiler.disable()
    def arrive(self, arriving: Tensor) -> Tensor:
        """Wait for the rows that ``leave`` returned."""
        return _Arrive.apply(arriving, self)

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Begin an exchange."""
        rows = rows.contiguous()
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        send = partial(dist.all_to_all_single, group=self.group, async_op=True)
        # Both must outlive the exchange.
        self._under_way = send(arrived, rows, received, sent), arrived, rows
        return arrived

    def finish(self) -> Tensor:
        """Wait for an exchange; on an accelerator the stream waits, not the host."""
        work, arrived, _ = self._under_way
        work.wait()
        self._under_way = ()
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.finish(), None  # used for its shape only


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange.start(gradients[0], ctx.exchange.received, ctx.exchange.sent)
        return gradients[0], None
