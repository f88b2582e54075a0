"""Proof that a model under context parallelism computes each position from that position alone.

A rank holds a slice of every sequence, and only attention knows it. A model that counts positions
inside its slice, shifts tokens or convolves over them trains another model, without an error. Away
from attention a permutation of the positions must permute everything that is computed. So the
first micro-batch passes through the model twice, in evaluation and without gradients: once as it
is and once with its positions permuted, with attention replaced by a function of each position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from forgekit.state import TrainState
from forgekit.steps.forward import LossFn, compute_loss, evaluating

__all__ = ["check_positions"]

CLOSE = 1e-2
"""Largest difference over the largest value, for 16 bits too; what is wrong differs by far more."""

Seen = list[tuple[str, Tensor]]


def check_positions(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> None:
    """Raise on every rank if a model under context parallelism makes its own positions.

    Args:
        state: The state; nothing in it changes.
        batch: This rank's slice of the first micro-batch, ``[b s/cp]``.
        loss_fn: ``loss_fn(model, batch) -> Loss``; called twice more.

    Raises:
        ValueError: With what depends on other positions, and the remedy.
    """
    problem = _find(state, batch, loss_fn)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    if found := next(filter(None, everyone), None):
        raise ValueError(
            f"{found}. Ranks that share a sequence (cp {state.layout.context}) hold slices of it: "
            "take positions from the batch (position_ids) or a socket, self.locate(s, device), "
            "and let them meet in self.attend(q, k, v, doc_ids=...) alone; or leave cp at 1. "
            "If the loss draws random numbers for each position, pass audit=False."
        )


def _find(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> str | None:
    places = _positions(batch)
    order = torch.randperm(places, generator=torch.Generator().manual_seed(places))
    order = order.to(state.targets.device)
    given, expected = _run(state, batch, loss_fn, None)
    if not given:
        return f"no module of {type(state.model).__name__} called its attend socket"
    permuted, found = _run(state, _permuted(batch, order, places), loss_fn, order)
    for (name, a), (_, b) in zip(given, permuted, strict=False):
        if not _is_close(a.index_select(1, order), b):
            return f"what attention {name!r} is given at a position depends on other positions"
    if len(given) != len(permuted) or not _is_close(expected, found):
        return "the loss at a position depends on other positions, past the attend sockets"
    return None


@torch.no_grad()
def _run(
    state: TrainState, batch: TensorDictBase, loss_fn: LossFn, order: Tensor | None
) -> tuple[Seen, Tensor]:
    """Queries, keys and values of one forward pass in the order of the calls, and the loss."""
    seen: Seen = []
    generator = torch.random.get_rng_state()
    with evaluating(state.model, state.layout), _recording(state.model, order, seen):
        loss = compute_loss(state.model, batch, loss_fn)
    torch.random.set_rng_state(generator)
    return seen, loss.sum


@contextmanager
def _recording(model: nn.Module, order: Tensor | None, seen: Seen) -> Iterator[None]:
    """Replace the sockets for a while: ``attend`` notes what it is given, ``locate`` permutes."""
    before = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in ("attend", "locate")
        if name in vars(module)
    ]
    names = {module: name for name, module in model.named_modules()}
    try:
        for module, socket, own in before:
            if socket == "attend":
                vars(module)[socket] = _recorder(names[module], seen)
            elif order is not None:
                vars(module)[socket] = _permuting(own, order)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, socket, own in before:
            vars(module)[socket] = own


def _recorder(name: str, seen: Seen) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        seen.extend((name, tensor.detach()) for tensor in (q, k, v))
        return q

    return attend


def _permuting(locate: Any, order: Tensor) -> Any:
    def permuted(s: int, device: torch.device) -> Tensor:
        ids = locate(s, device)
        return ids.index_select(ids.ndim - 1, order)

    return permuted


def _positions(batch: TensorDictBase) -> int:
    key = "input_ids" if "input_ids" in batch.keys() else next(iter(batch.keys()))  # noqa: SIM118
    return batch[key].shape[1]


def _permuted(batch: TensorDictBase, order: Tensor, places: int) -> TensorDictBase:
    """The batch with the positions of everything that has them in another order."""
    items = dict(batch.items())
    moved = {
        key: value.index_select(1, order)
        for key, value in items.items()
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == places
    }
    return TensorDict({**items, **moved}, batch.batch_size)


def _is_close(a: Tensor, b: Tensor) -> bool:
    a, b = a.double(), b.double()
    if a.shape != b.shape:
        return False
    if not (a.isfinite().all() and b.isfinite().all()):
        return True  # a bad step anyway
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())
