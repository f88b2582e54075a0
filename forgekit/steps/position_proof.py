"""Proof that context parallelism trains what one rank would: sums over independent positions.

A rank holds a slice of every sequence, and only attention knows it. A model that counts positions
inside its slice, shifts tokens or convolves over them trains another model; a loss that is no sum
over positions (a preference between rows, a mean over each) is another loss. Neither raises an
error. Away from attention some of the positions must give just their share of everything. So the
first micro-batch passes through the model again, in evaluation and without gradients: as it is and
in two halves drawn at random, with attention replaced by a function of each position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from forgekit.model.routing import Router
from forgekit.parallel.agreement import raise_together
from forgekit.state import TrainState
from forgekit.steps.forward import LossFn, compute_loss, evaluating
from forgekit.steps.losses import Loss

CLOSE = 1e-2
"""Largest difference over the largest value, for 16 bits too; what is wrong differs by far more."""

SUMS_CLOSE = 1e-3
"""The same for sums of losses, where the model computes in more than 16 bits."""

SOCKETS = ("attend", "locate")
SHARED = "forgekit.parallel.context."
"""Where the sockets of ranks that share a sequence come from."""

OUTPUT = "the model returns"

Seen = list[tuple[str, Tensor]]


def check_positions(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> None:
    """Raise on every rank if context parallelism would train another model or another loss.

    Args:
        state: The state; nothing in it changes.
        batch: This rank's slice of the first micro-batch, ``[b s/cp]``.
        loss_fn: ``loss_fn(model, batch) -> Loss``; called three times more.

    Raises:
        ValueError: With what depends on other positions, and the remedy.
    """
    raise_together(_find(state, batch, loss_fn))


def halves_of(batch: TensorDictBase, multiple: int = 1) -> list[Tensor]:
    """Draw two halves of a slice's positions, the same on every rank, on the batch's device.

    Args:
        batch: ``[b s]``.
        multiple: What the size of each must be divisible by; where that leaves no half, all
            positions come in one, in another order.
    """
    length = _positions(batch)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(length))
    cut = length // multiple // 2 * multiple
    return [half.to(_first(batch).device) for half in (order[:cut], order[cut:]) if len(half)]


def take_positions(value: Any, chosen: Tensor, length: int) -> Any:
    """Take some of the positions of every tensor in a model's output that has them."""

    def take(leaf: Any) -> Any:
        return leaf.index_select(1, chosen) if _has(leaf, length) else leaf

    if isinstance(value, TensorDictBase):
        taken = {key: take_positions(item, chosen, length) for key, item in value.items()}
        return TensorDict(taken, value.batch_size[:1])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{n: tree_map(take, getattr(value, n)) for n in names})
    return tree_map(take, value)


def find_unequal(whole: Loss, parts: list[Loss], *, context: int, close: float) -> str | None:
    """Find whether a loss is more, or less, than the sum of its parts.

    Args:
        whole: The loss of all positions.
        parts: Those of some of them each, all together.
        context: Ranks that share a sequence.
        close: Largest difference of the sums over the largest of them.

    Returns:
        What is wrong with the remedy, or None.
    """
    losses = [whole, *parts]
    # Without the means that it got, which each slice has of its own.
    sums, counts = [loss.sum - loss.means for loss in losses], [loss.count for loss in losses]
    for what, found in {"sums": sums, "counts": counts}.items():
        values = torch.tensor([float(value) for value in found], dtype=torch.float64)
        bound = close * values.abs().max()
        if values.isfinite().all() and not (values[0] - values[1:].sum()).abs() <= bound:
            shown = " + ".join(f"{float(value):.6g}" for value in values[1:])
            return (
                f"loss_fn is no sum over positions: its {what} are {float(values[0]):.6g} for all "
                f"and {shown} for two halves of them. Ranks that share a sequence (cp {context}) "
                "add up the losses and counts of their slices. Sum over positions and count "
                "those with a target; a loss of whole rows (a preference, a mean over each row) "
                "needs cp at 1. If it draws random numbers, or adds rows up over the ranks "
                "itself, pass audit=False."
            )
    return None


def _find(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> str | None:
    context, length = state.layout.context, _positions(batch)
    halves = halves_of(batch, state.layout.sequence)
    given, whole = _run(state, batch, loss_fn)
    # All of them before the first comparison: ranks must run the same collectives.
    runs = [_run(state, take_positions(batch, h, length), loss_fn, h, length) for h in halves]
    if all(name == OUTPUT for name, _ in given):
        return f"no module of {type(state.model).__name__} called its attend socket" + _remedy(
            context
        )
    for half, (seen, _) in zip(halves, runs, strict=True):
        for (name, a), (_, b) in zip(given, seen, strict=False):
            if not _is_close(a.index_select(1, half), b):
                return f"what {name} at a position depends on other positions" + _remedy(context)
    is_narrow = any(tensor.element_size() == 2 for _, tensor in given)
    close = CLOSE if is_narrow else SUMS_CLOSE
    return find_unequal(whole, [loss for _, loss in runs], context=context, close=close)


def _remedy(context: int) -> str:
    return (
        f". Ranks that share a sequence (cp {context}) hold slices of it: take positions from the "
        "batch (position_ids) or a socket, self.locate(s, device), and let them meet in "
        "self.attend(q, k, v, doc_ids=...) alone; or leave cp at 1."
    )


@torch.no_grad()
def _run(
    state: TrainState,
    batch: TensorDictBase,
    loss_fn: LossFn,
    chosen: Tensor | None = None,
    length: int = 0,
) -> tuple[Seen, Loss]:
    """What attention was given and the model returned in one forward pass, and the loss."""
    seen: Seen = []
    device = state.targets.device
    with (
        torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type),
        evaluating(state.model, state.layout),
        torch.compiler.set_stance("force_eager"),
        _recording(state.model, chosen, length, seen),
        _outputs(state.model, _positions(batch), seen),
        _choosing_freely(state.model),
    ):
        loss = compute_loss(state.model, batch, loss_fn)
    return seen, loss


@contextmanager
def _recording(model: nn.Module, chosen: Tensor | None, length: int, seen: Seen) -> Iterator[None]:
    """Replace the sockets for a while: ``attend`` notes what it is given, ``locate`` chooses.

    Those of other models that the loss calls too, a teacher's, where ranks share sequences there.
    """
    before: dict[nn.Module, dict[str, Any]] = {}
    names = {module: name for name, module in model.named_modules()}

    def replace(module: nn.Module, *_: Any) -> None:
        if module in before:
            return
        own = {name: vars(module)[name] for name in SOCKETS if name in vars(module)}
        before[module] = {n: s for n, s in own.items() if module in names or _is_shared(s)}
        for name, socket in before[module].items():
            if name == "attend":
                shown = repr(names.get(module, type(module).__name__))
                vars(module)[name] = partial(_record, seen, f"attention {shown} is given")
            elif chosen is not None:
                vars(module)[name] = partial(_locate, socket, chosen, length)

    hook = register_module_forward_pre_hook(replace)
    try:
        for module in names:
            replace(module)
        yield
    finally:
        hook.remove()
        for module, sockets in before.items():
            vars(module).update(sockets)


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


def _is_shared(socket: Any) -> bool:
    return str(getattr(socket, "__module__", "")).startswith(SHARED)


def _record(seen: Seen, what: str, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    seen.extend((what, tensor.detach()) for tensor in (q, k, v))
    return q


def _locate(socket: Any, chosen: Tensor, length: int, _s: int, device: torch.device) -> Tensor:
    ids = socket(length, device)
    return ids.index_select(ids.ndim - 1, chosen)


@contextmanager
def _outputs(model: nn.Module, length: int, seen: Seen) -> Iterator[None]:
    """Note the tensors that the model returns and that have positions."""

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        values = vars(output) if dataclasses.is_dataclass(output) else output
        seen.extend((OUTPUT, leaf.detach()) for leaf in tree_leaves(values) if _has(leaf, length))

    with model.register_forward_hook(note):
        yield


def _positions(batch: TensorDictBase) -> int:
    return _first(batch).shape[1]


def _first(batch: TensorDictBase) -> Tensor:
    tensors = (value for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1)
    return batch["input_ids"] if "input_ids" in batch.keys() else next(tensors)  # noqa: SIM118


def _has(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length


def _is_close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    if a.shape != b.shape:
        return False
    if not (a.isfinite().all() and b.isfinite().all()):
        return True  # a bad step anyway
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())
