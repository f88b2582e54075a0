"""Proof that ranks that share sequences train what one rank would.

A rank holds a slice of every sequence, and only attention knows it. A model that counts positions
inside its slice, shifts tokens or convolves over them trains another model; a loss that is no sum
over positions (a preference between rows, a mean over each) is another loss. Neither raises an
error. So a short piece of the first micro-batch passes through the model twice, in evaluation and
without gradients: in slices, and whole on every rank with the attention of one device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from forgekit.model.routing import Router
from forgekit.parallel.agreement import exchange, raise_together
from forgekit.parallel.context.context_parallel import locate_slice, with_sockets
from forgekit.parallel.layout import world_of
from forgekit.state import Layout, TrainState, layout_of
from forgekit.steps.audit.agreement import compare_modules
from forgekit.steps.losses import Loss
from forgekit.steps.micro_batch import LossFn, compute_loss, evaluating, take_part
from forgekit.steps.pipelined import evaluate_staged

CLOSE = 1e-2
"""Largest difference over the largest value, for 16 bits too; what is wrong differs by far more."""

SUMS_CLOSE = 1e-3
"""The same for sums of losses, where the model computes in more than 16 bits."""

LONGEST = 4096
"""Positions that are compared at most: every rank holds all of them."""

OUTPUT = "the model returns"

REMEDY = (
    "Ranks that share a sequence (cp {}) hold slices of it: take positions from the batch "
    "(position_ids) or self.locate(s, device), let them meet in self.attend(q, k, v, doc_ids=...) "
    "alone, and sum losses and counts over positions; a loss of whole rows needs cp=1. If the loss "
    "draws random numbers, or adds up over the ranks itself, pass audit=False."
)


@torch.no_grad()
def check_positions(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> None:
    """Raise on every rank if context parallelism would train another model or another loss.

    Args:
        state: The state; nothing in it changes.
        batch: The first micro-batch, whole sequences ``[b s]``.
        loss_fn: ``loss_fn(model, batch) -> Loss``; called twice more.

    Raises:
        ValueError: With what depends on other positions, and the remedy.
    """
    layout, mesh = state.layout, cast("DeviceMesh", state.mesh)
    ranks = mesh["cp"].get_group()
    # No more than a rank's slice has: every rank holds all of them.
    ids = batch.get("input_ids", None)
    most = LONGEST if ids is None else min(LONGEST, ids.shape[-1] // layout.context)
    short = first_rows(batch, ranks, most, layout.positions_multiple)
    seen, loss = _run(state, layout, short, loss_fn)
    with _as_one_device(state.model, layout):
        whole, whole_loss = _run(state, attrs.evolve(layout, ring=1, ulysses=1), short, loss_fn)
    attends = exchange(any(name != OUTPUT for name, _ in seen), world_of(mesh))
    problem = _find_difference(layout, whole, seen)
    if not any(attends):
        problem = f"no module of {type(state.model).__name__} called its attend socket"
    remedy = REMEDY.format(layout.context)
    raise_together(problem and f"{problem}. {remedy}")
    # All ranks that share sequences have their losses, or none of them has.
    is_narrow = any(tensor.element_size() == 2 for _, tensor in seen)
    bound = CLOSE if is_narrow else SUMS_CLOSE
    problem = _compare_sums(whole_loss, loss, ranks, bound) if layout.has_last else None
    raise_together(problem and f"{problem}. {remedy}")


def first_rows(
    batch: TensorDictBase, ranks: dist.ProcessGroup, most: int, multiple: int
) -> TensorDictBase:
    """The first positions of the first rank's sequences, for a pass beside the step, on the host.

    Rows that ranks should share and do not are refused elsewhere.

    Args:
        batch: Whole sequences ``[b s]``; one without ``input_ids`` is taken as it is.
        ranks: Those that share its rows.
        most: Positions to take at most.
        multiple: Divides their number.
    """
    taken = dict(batch.items(include_nested=True, leaves_only=True))
    ids = taken.get("input_ids")
    if ids is not None and ids.ndim > 1:
        length = max(multiple, min(most, ids.shape[1]) // multiple * multiple)
        taken = {
            key: value[:, :length].contiguous() if value.shape[:2] == ids.shape else value
            for key, value in taken.items()
        }
    sent: list[Any] = [TensorDict(taken, batch.batch_size[:1]).cpu()]
    dist.broadcast_object_list(sent, group=ranks, group_src=0)
    return sent[0]


@contextmanager
def beside_the_step(state: TrainState) -> Iterator[None]:
    """Run the model in evaluation, as its code is written; random numbers are put back."""
    device = state.targets.device
    with (
        # A block that the compiler met in here would be compiled for evaluation.
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type),
        evaluating(state.model, state.layout),
    ):
        yield


def _run(
    state: TrainState, layout: Layout, batch: TensorDictBase, loss_fn: LossFn
) -> tuple[list[tuple[str, Tensor]], Loss | None]:
    """What attention is given and the model returns, and the loss where this rank has it."""
    seen: list[tuple[str, Tensor]] = []
    losses: list[Loss] = []

    def noting(model: nn.Module, part: TensorDictBase) -> Loss:
        losses.append(loss_fn(model, part))
        return losses[-1]

    def attending(name: str, attend: Any, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        seen.extend((f"attention {name!r} is given", tensor.detach()) for tensor in (q, k, v))
        return attend(q, k, v, **keywords)

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        values = vars(output) if dataclasses.is_dataclass(output) else output
        tensors = (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.ndim > 1)
        seen.extend((OUTPUT, tensor.detach()) for tensor in tensors)

    replaced: dict[str, dict[str, Any]] = {}
    for name, module in state.model.named_modules():
        if "attend" in vars(module):
            replaced[name] = {"attend": partial(attending, name, module.attend)}
        elif isinstance(module, Router):
            # A capacity depends on the other tokens of a slice, and so do experts that take turns:
            # both are asked for, and neither needs whole sequences.
            free = attrs.evolve(module.spec, capacity=None, force_balance=False)
            replaced[name] = {"spec": free}
    with beside_the_step(state), with_sockets(state.model, replaced), ExitStack() as hooks:
        for root in layout.roots(state.model):
            hooks.enter_context(root.register_forward_hook(note))
        if layout.stages is None:
            compute_loss(state.model, take_part(batch, layout, state.targets.device), noting)
            compare_modules(state.mesh, "the end of a short pass")
        else:
            evaluate_staged(attrs.evolve(state, layout=layout), [batch], noting)
    return seen, losses[-1] if losses else None  # before it those of a pipeline's rehearsal


def _find_difference(
    layout: Layout, whole: list[tuple[str, Tensor]], seen: list[tuple[str, Tensor]]
) -> str | None:
    """Say what differs first at this rank's positions."""
    locate = locate_slice(layout.ring, layout.ulysses, layout.context_rank)
    # The last of each: before them the first pass may have those of a pipeline's rehearsal.
    count = min(len(whole), len(seen))
    for (name, a), (_, b) in zip(whole[-count:], seen[-count:], strict=True):
        here = locate(b.shape[1], b.device)
        is_close = int(here.max()) < a.shape[1] and a[:, here].shape == b.shape
        if is_close:
            part, b = a[:, here].double(), b.double()
            is_finite = part.isfinite().all() and b.isfinite().all()  # else a bad step anyway
            is_close = not is_finite or (part - b).abs().max() <= CLOSE * part.abs().max()
        if not is_close:
            return f"what {name} at a position depends on other positions"
    return None


def _compare_sums(whole: Any, part: Any, ranks: dist.ProcessGroup, close: float) -> str | None:
    """Say that the losses of slices do not add up to that of whole sequences."""
    # Without the means that a loss got: each slice has its own.
    totals, here = ((float(one.sum - one.means), float(one.count)) for one in (whole, part))
    everywhere = exchange(here, group=ranks)
    for name, total, *numbers in zip(("sums", "counts"), totals, *everywhere, strict=True):
        # A step that is not finite is a bad one anyway.
        is_finite = all(map(math.isfinite, (total, *numbers)))
        bound = close * max(map(abs, (total, *numbers)))
        if is_finite and abs(total - sum(numbers)) > bound:
            shown = " + ".join(f"{number:.6g}" for number in numbers)
            return (
                f"loss_fn is not a sum over positions: its {name} are {total:.6g} for whole "
                f"sequences and {shown} for slices of them"
            )
    return None


@contextmanager
def _as_one_device(model: nn.Module, layout: Layout) -> Iterator[None]:
    """Let a model, and others that its loss calls, a teacher's, attend to whole sequences."""
    with ExitStack() as stack:
        stack.enter_context(with_sockets(model, layout.sockets))
        met = set(model.modules())

        def meet(module: nn.Module, *_: Any) -> None:
            if module not in met:
                met.update(module.modules())
                stack.enter_context(with_sockets(module, layout_of(module).sockets))

        hook = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            hook.remove()
