"""Step parameters by a chain of transforms, in any layout; a bad step changes nothing.

What stands before the first whole transform and behind the last runs on this rank's shards; from
the first to the last, directions are with the owners of the matrices, and so is state. Such state
is kept as ``{number in the stack: tensor}``, 0 for a plain matrix, on its owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgekit.optim.owners import Bundle, bundles, from_owners, to_owners, total_over_shards
from forgekit.optim.step_each import call_closure, is_skipped, keep_or_write, scaled_gradient
from forgekit.optim.transforms import At, State, Tensors, Transform, middle_of
from forgekit.tensors import local, wide

AT_ONCE = {"cpu": 2**15}
"""Elements of shards that local transforms step at once: a few copies of them live meanwhile, on a
CPU in its caches."""

UNREAD = torch.tensor(torch.nan, dtype=torch.float64)
"""A number of ``At`` that no transform of the chain reads."""

Writes = list[tuple[Tensor, Tensor]]
"""Tensors of state, each with what it becomes."""

Finish = Callable[[dict[str, Any], Tensor, Tensor, Tensor], Tensor]
"""Of a group, a parameter, its next values and the number of the step: what is written."""


def step_chain(
    optimizer: Optimizer,
    chain_of: Callable[[dict[str, Any]], Sequence[Transform]],
    closure: Callable[[], Any] | None = None,
    *,
    reads: Collection[str] = (),
    finish: Finish = lambda group, parameter, values, step: values,  # noqa: ARG005
) -> Any:
    """Step every parameter that has a gradient, in place; all ranks call it.

    Args:
        optimizer: What is stepped; it has ``_step_supports_amp_scaling = True``.
        chain_of: The chain of a group. A group's ``state_step`` counts calls where ``update``
            does not set it.
        closure: Computes the loss again; called once.
        reads: What ``check_chain`` found.
        finish: What is written of a parameter's next values.

    Returns:
        What the closure returned, else None.
    """
    loss, skip, start = call_closure(closure), is_skipped(optimizer), 0
    good = None if skip is None else (~skip).to(torch.float64)
    for group in optimizer.param_groups:
        step = _Step(optimizer, group, chain_of(group), skip, good, reads, finish)
        for parameters, some in step.parts(start):
            if any(p.grad is not None for p in parameters):
                step.take(parameters, some)
        start += len(group["params"])
        if "state_step" in group:
            group["state_step"] += 1
    return loss


class _Step:
    """One step of a group."""

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        chain: Sequence[Transform],
        skip: Tensor | None,
        good: Tensor | None,
        reads: Collection[str],
        finish: Finish,
    ) -> None:
        self.optimizer, self.group, self.skip, self.good = optimizer, group, skip, good
        self.reads, self.finish, self.lr = reads, finish, float(group["lr"])
        self.used = {name.removeprefix("whole ") for name in reads}
        middle = middle_of(chain)
        self.before, self.middle = chain[: middle.start], chain[middle]
        self.after, self.writes = chain[middle.stop :], Writes()
        # Decay at the end is one product with the values, as in torch.
        self.decays = bool(self.after) and self.after[-1].ends_in_decay
        self.after = self.after[: len(self.after) - self.decays]

    def parts(self, start: int) -> Iterator[tuple[list[Tensor], list[Bundle]]]:
        """Yield parameters that step at once, with their owners where there are some."""
        parameters = self.group["params"]
        if self.middle:
            together = [*bundles(parameters, start)]
            # A sum over shards costs one collective for all parameters, so all are there at once.
            parts = [together] if "total" in self.reads else [[bundle] for bundle in together]
            yield from (([p for b in part for p in b.parameters], part) for part in parts)
        elif "total" in self.reads:
            yield parameters, []
        else:  # only what has a gradient, and each with its own count where that is read
            some, size = [], 0
            for parameter in (p for p in parameters if p.grad is not None):
                shard = local(parameter)
                most = AT_ONCE.get(shard.device.type, 2**24)
                if some and ("step" in self.reads or size + shard.numel() > most):
                    yield some, []
                    some, size = [], 0
                some.append(parameter)
                size += shard.numel()
            yield some, []

    @torch.no_grad()
    def take(self, parameters: list[Tensor], some: list[Bundle]) -> None:
        """Compute all that is new, then write it unless the step is bad."""
        shards, self.writes = [local(p) for p in parameters], Writes()
        counts = [self._count(p) for p in parameters] if "step" in self.used else []
        at = self._at(parameters, shards, counts[0] + 1 if counts else UNREAD)
        directions = self._run(self.before, parameters, at.gradients, at)
        if some:
            wanted = (iter([*directions]), iter(at.values), iter(at.gradients))
            directions = [
                direction
                for bundle in some
                for direction in self._on_owners(
                    bundle, *([*islice(each, len(bundle.parameters))] for each in wanted), at=at
                )
            ]
        directions = self._run(self.after, parameters, directions, at)
        if self.decays:
            moved = torch._foreach_mul(at.values, 1 - self.lr * at.weight_decay)
            torch._foreach_add_(moved, directions, alpha=-self.lr)
        else:
            moved = torch._foreach_add(at.values, directions, alpha=-self.lr)
        pairs = zip(parameters, moved, strict=True)
        moved = [self.finish(self.group, p, values, at.step) for p, values in pairs]
        # State first: it may become the values, or what another entry was.
        olds = {id(old) for old, _ in self.writes}
        writes = [
            (old, new.clone() if new is not old and id(new) in olds else new)
            for old, new in self.writes
        ]
        for old, new in [*writes, *zip(shards, moved, strict=True)]:
            keep_or_write(None if self.skip is None else self.skip.to(old.device), old, new)
        if counts:
            good = torch.ones_like(counts[0]) if self.good is None else self.good
            torch._foreach_add_(counts, [good] * len(counts))  # one number for all waits on a CPU

    def _at(self, parameters: list[Tensor], shards: Tensors, step: Tensor) -> At:
        group = self.group
        gradients = [scaled_gradient(self.optimizer, parameter) for parameter in parameters]
        number = group.get("state_step", 0) + 1
        return At(
            step=step,
            lr=torch.full((), self.lr, dtype=torch.float64, device=shards[0].device)
            if "lr" in self.used
            else UNREAD,
            values=[v.to(g.dtype) for v, g in zip(shards, gradients, strict=True)],
            gradients=gradients,
            total=partial(total_over_shards, parameters),
            every=lambda steps: number % steps == 0,
            weight_decay=group.get("weight_decay", 0.0),
            rows=group.get("rows"),
        )

    def _count(self, parameter: Tensor) -> Tensor:
        """Good steps of a parameter; a checkpoint may bring the number on the host."""
        entries, device = self.optimizer.state[parameter], local(parameter).device
        count = entries.get("step", torch.zeros((), dtype=torch.float64))
        entries["step"] = count.to(device)
        return entries["step"]

    def _run(
        self, chain: Sequence[Transform], parameters: list[Tensor], directions: Tensors, at: At
    ) -> Tensors:
        """Apply transforms to shards, and note what becomes of their state."""
        for each in chain:
            state = {
                name: [self._shard(p, name, make) for p in parameters]
                for name, make in each.state.items()
            }
            directions, new = each.apply([*directions], state, at)
            self._note(state, new)
        return directions

    def _note(self, state: State, new: State) -> None:
        for name, entries in state.items():
            self.writes += zip(entries, new[name], strict=True)

    def _shard(self, parameter: Tensor, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        entries, dtype = self.optimizer.state[parameter], wide(parameter.dtype)
        if name not in entries:
            shard = local(parameter)
            made = make(shard.to(dtype)).clone()  # not the parameter itself
            entries[name] = made
            if made.shape == shard.shape and isinstance(parameter, DTensor):
                entries[name] = torch.empty_like(parameter, dtype=made.dtype)
                local(entries[name]).copy_(made)
        if entries[name].ndim == 0:
            entries[name] = entries[name].to(local(parameter).device)
        return local(entries[name])

    def _on_owners(
        self, bundle: Bundle, directions: Tensors, values: Tensors, gradients: Tensors, at: At
    ) -> Tensors:
        """Bring directions to the owners, apply whole transforms there, and bring them back."""
        like, home = bundle.parameters[0], directions[0].device
        shape, wider = directions[0].shape, directions[0].dtype
        where = like.device_mesh.device_type if isinstance(like, DTensor) else home  # offloaded

        def gather(shards: Tensors, dtype: torch.dtype) -> Tensors:
            stacked = torch.stack([shard.to(where, dtype) for shard in shards])
            return [*to_owners(stacked.flatten(0, -3), bundle.route).unbind()]

        matrices = gather(directions, self.middle[0].dtype or wider)
        read = {
            name: gather(shards, wider) if f"whole {name}" in self.reads else []
            for name, shards in (("values", values), ("gradients", gradients))
        }
        # What is whole needs no sum.
        at = at._replace(
            **read, step=at.step.to(where), lr=at.lr.to(where), total=lambda numbers: [*numbers]
        )
        back = self.middle[-1].dtype or wider
        whole = like.shape[-2:]
        if matrices:
            for each in self.middle:
                zero = torch.zeros(whole, dtype=wider, device=where)
                state = {
                    name: [self._whole(*owned, name, make, zero) for owned in bundle.owned()]
                    for name, make in each.state.items()
                }
                matrices, new = each.apply(matrices, state, at)
                self._note(state, new)
            stacked = torch.stack([*matrices]).to(back)
        else:
            stacked = torch.empty((0, *whole), dtype=back, device=where)
        count = len(directions) * bundle.each
        shared = from_owners(stacked, bundle.route, (count, *shape[-2:]))
        back = wider if self.after else back  # else it is added to wider values
        return [*shared.view(len(directions), *shape).to(home, back).unbind()]

    def _whole(
        self,
        parameter: Tensor,
        number: int,
        name: str,
        make: Callable[[Tensor], Tensor],
        zero: Tensor,
    ) -> Tensor:
        held = self.optimizer.state[parameter].setdefault(name, {})
        if number not in held:
            held[number] = make(zero).clone()
        held[number] = held[number].to(zero.device)
        return held[number]


def owned_matrices(optimizer: Optimizer, chain: Sequence[Transform]) -> dict[Tensor, list[int]]:
    """List which matrices of each parameter's stack this rank owns, where a chain has owners."""
    owned: dict[Tensor, list[int]] = {}
    start, middle = 0, middle_of(chain)
    for group in optimizer.param_groups if middle.stop > middle.start else ():
        for bundle in bundles(group["params"], start):
            owned |= {p: [] for p in bundle.parameters}
            for parameter, number in bundle.owned():
                owned[parameter].append(number)
        start += len(group["params"])
    return owned
