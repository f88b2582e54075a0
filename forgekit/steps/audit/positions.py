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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

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
    "(position_ids) or a socket, self.locate(s, device), let them meet in self.attend(q, k, v, "
    "doc_ids=...) alone, and add losses and counts up over positions; a loss of whole rows (a "
    "preference, a mean over each row) needs cp at 1. If the loss draws random numbers, or adds "
    "rows up over the ranks itself, pass audit=False."
)


class _Pass(NamedTuple):
    """What attention was given and the model returned, and the loss where this rank has it."""

    seen: list[tuple[str, Tensor]]
    losses: list[Loss]


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
    layout = state.layout
    one = attrs.evolve(layout, ring=1, ulysses=1)
    mesh = cast("DeviceMesh", state.mesh)
    # No more than a rank's slice has: every rank holds all of them.
    ids = batch.get("input_ids", None)
    most = LONGEST if ids is None else min(LONGEST, ids.shape[-1] // layout.context)
    short = first_rows(batch, mesh["cp"].get_group(), most, layout.positions_multiple)
    given = _run(state, layout, short, loss_fn)
    with _as_one_device(state.model, layout):
        expected = _run(state, one, short, loss_fn)
    attends = exchange(any(name != OUTPUT for name, _ in given.seen), world_of(mesh))
    problem = _differing(layout, given, expected)
    if not any(attends):
        problem = f"no module of {type(state.model).__name__} called its attend socket"
    remedy = REMEDY.format(layout.context)
    raise_together(problem and f"{problem}. {remedy}")
    # All ranks that share sequences have their losses, or none of them has.
    problem = _apart(given, expected, mesh["cp"].get_group()) if layout.has_last else None
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
            key: value[:, :length] if value.shape[:2] == ids.shape else value
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


def _run(state: TrainState, layout: Layout, batch: TensorDictBase, loss_fn: LossFn) -> _Pass:
    run = _Pass([], [])

    def noting(model: nn.Module, part: TensorDictBase) -> Loss:
        loss = loss_fn(model, part)
        run.losses.append(loss)
        return loss

    with (
        beside_the_step(state),
        _recording(state.model, layout, run.seen),
        _choosing_freely(state.model),
    ):
        if layout.stages is None:
            compute_loss(state.model, take_part(batch, layout, state.targets.device), noting)
        else:
            evaluate_staged(attrs.evolve(state, layout=layout), [batch], noting)
    return run


def _differing(layout: Layout, given: _Pass, expected: _Pass) -> str | None:
    """Say what differs first at this rank's positions."""
    locate = locate_slice(layout.ring, layout.ulysses, layout.context_rank)
    # The last of each: before them the first pass may have those of a pipeline's rehearsal.
    count = min(len(expected.seen), len(given.seen))
    pairs = zip(expected.seen[-count:], given.seen[-count:], strict=True)
    names = (name for (name, whole), (_, part) in pairs if not _is_close(whole, part, locate))
    name = next(names, None)
    return name and f"what {name} at a position depends on other positions"


def _apart(given: _Pass, expected: _Pass, ranks: dist.ProcessGroup) -> str | None:
    """Say that the losses of slices do not add up to that of whole sequences."""
    is_narrow = any(tensor.element_size() == 2 for _, tensor in given.seen)
    whole, parts = _sums(expected), [_sums(given)] * ranks.size()
    dist.all_gather_object(parts, parts[0], group=ranks)
    for name, total, numbers in zip(
        ("sums", "counts"), whole, zip(*parts, strict=True), strict=True
    ):
        bound = (CLOSE if is_narrow else SUMS_CLOSE) * max(map(abs, (total, *numbers)))
        # A step that is not finite is a bad one anyway.
        if all(map(math.isfinite, (total, *numbers))) and abs(total - sum(numbers)) > bound:
            shown = " + ".join(f"{number:.6g}" for number in numbers)
            return (
                f"loss_fn is no sum over positions: its {name} are {total:.6g} for whole sequences "
                f"and {shown} for slices of them"
            )
    return None


def _sums(run: _Pass) -> tuple[float, float]:
    """Sum and count of the loss, without the means that it got: each slice has its own."""
    loss = run.losses[-1]  # before it those of a pipeline's rehearsal
    return float(loss.sum - loss.means), float(loss.count)


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


@contextmanager
def _recording(model: nn.Module, layout: Layout, seen: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Note what attention is given, and what the model, or its stages, return."""
    attending: dict[str, Any] = {
        n: m.attend for n, m in model.named_modules() if "attend" in vars(m)
    }
    noting = {n: {"attend": partial(_attend, seen, n, f)} for n, f in attending.items()}

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        values = vars(output) if dataclasses.is_dataclass(output) else output
        tensors = (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.ndim > 1)
        seen.extend((OUTPUT, tensor.detach()) for tensor in tensors)

    with ExitStack() as stack:
        stack.enter_context(with_sockets(model, noting))
        for root in layout.roots(model):
            stack.enter_context(root.register_forward_hook(note))
        yield


def _attend(
    seen: list[tuple[str, Tensor]],
    name: str,
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **keywords: Any,
) -> Tensor:
    seen.extend((f"attention {name!r} is given", tensor.detach()) for tensor in (q, k, v))
    return attend(q, k, v, **keywords)


@contextmanager
def _choosing_freely(model: nn.Module) -> Iterator[None]:
    """Let each token go to the experts that its own scores choose, for a while.

    A capacity depends on the other tokens of a slice, and so do experts that take turns: both are
    asked for, and neither needs whole sequences.
    """
    before = {m: m.spec for m in model.modules() if isinstance(m, Router)}
    for router, spec in before.items():
        router.spec = attrs.evolve(spec, capacity=None, force_balance=False)
    try:
        yield
    finally:
        for router, spec in before.items():
            router.spec = spec


def _is_close(whole: Tensor, part: Tensor, locate: Callable[..., Tensor]) -> bool:
    """Whether this rank's positions of the whole are what its slice has."""
    here = locate(part.shape[1], part.device)
    if int(here.max()) >= whole.shape[1]:
        return False
    a, b = whole.index_select(1, here).double(), part.double()
    if a.shape != b.shape:
        return False
    if not (a.isfinite().all() and b.isfinite().all()):
        return True  # a bad step anyway
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())
