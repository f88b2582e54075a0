"""Update parameters by a chain of transforms, in any layout; a bad step changes nothing.

Transforms before the first whole one and after the last run on this rank's shards. From the first
to the last, directions are with the owners of the matrices, and so is state: such an entry is kept
on its owner alone, as ``{number: tensor}``, with the number of the matrix in its stack.

``update`` sets two 0-d tensors on an optimizer: ``grad_scale``, by which gradients are divided,
and ``found_inf``, 1.0 where the step is bad. Nothing is read on the host: new values are computed
in either case, and old ones kept where the step is bad, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgekit.optim.owners import Bundle, bundles, from_owners, to_owners, total_over_shards
from forgekit.optim.rounding import round_values
from forgekit.optim.transforms import At, Tensors, Transform, number, run, split_chain
from forgekit.tensors import local, wide

AT_ONCE = {"cpu": 2**15}
"""Elements of shards that local transforms process at once: on a CPU a few temporary copies of them
fit its caches."""

UNREAD = torch.tensor(torch.nan, dtype=torch.float64)
"""Stands in for the step of ``At`` if no transform of the chain reads it."""

Chain = Sequence[Transform]

Holder = tuple[Tensor, int | None]
"""A parameter, and, for an owner's state, the number of the matrix in its stack."""


def step_chain(
    optimizer: Optimizer,
    chain_of: Callable[[dict[str, Any]], Chain],
    closure: Callable[[], Any] | None = None,
    *,
    reads: Collection[str],
    moves: bool = True,
) -> Any:
    """Step every parameter that has a gradient, in place; all ranks call it.

    Args:
        optimizer: The optimizer; it has ``_step_supports_amp_scaling = True``.
        chain_of: The chain of a group. A group's ``state_step`` counts calls where ``update``
            does not set it.
        closure: Recomputes the loss; called once.
        reads: What ``check_chain`` returned.
        moves: Whether parameters move against the directions; else directions are the next values.

    Returns:
        What the closure returned, else None.
    """
    loss = closure and torch.enable_grad()(closure)()
    for group in optimizer.param_groups:
        step = _Step(optimizer, group, *split_chain(chain_of(group)), reads=reads, moves=moves)
        for parameters, some in step.parts():
            if any(p.grad is not None for p in parameters):
                step.take(parameters, some)
        if "state_step" in group:
            group["state_step"] += 1
    return loss


@attrs.define
class _Step:
    """One step of a group, by transforms before, on and after the owners of matrices."""

    optimizer: Optimizer
    group: dict[str, Any]
    before: Chain
    middle: Chain
    after: Chain
    reads: Collection[str]
    moves: bool
    writes: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    def parts(self) -> Iterator[tuple[list[Tensor], list[Bundle]]]:
        """Yield parameters that step together, with their bundles if they have owners."""
        parameters = self.group["params"]
        if self.middle:
            together = [*bundles(parameters)]
            # All at once: a sum over shards is then one collective for all parameters.
            parts = [together] if "total" in self.reads else [[bundle] for bundle in together]
            yield from (([p for b in part for p in b.parameters], part) for part in parts)
        elif "total" in self.reads:
            yield parameters, []
        else:
            some, room = [], 0
            for parameter in (p for p in parameters if p.grad is not None):
                shard = local(parameter)
                if shard.numel() > room:
                    yield some, []
                    some, room = [], AT_ONCE.get(shard.device.type, 2**24)
                some.append(parameter)
                room -= shard.numel()
            yield some, []

    @torch.no_grad()
    def take(self, parameters: list[Tensor], some: list[Bundle]) -> None:
        """Compute new values and state, then write them unless the step is bad."""
        self.writes.clear()
        shards, holders = [local(p) for p in parameters], [(p, None) for p in parameters]
        at = self._at(parameters, shards, holders)
        directions = self._run(self.before, holders, at.gradients, at.values, at)
        if some:
            directions, sent = [], zip(directions, at.values, at.gradients, strict=True)
            for bundle in some:
                its = zip(*(next(sent) for _ in bundle.parameters), strict=True)
                directions += self._on_owners(bundle, *its, at=at)
        # Decay at the end is one product with the values, as in torch.
        decays = bool(self.after) and self.after[-1].kind == "decay"
        after = self.after[:-1] if decays else self.after
        moved, lr = self._run(after, holders, directions, at.values, at), float(self.group["lr"])
        if self.moves and decays:
            values = torch._foreach_mul(at.values, 1 - lr * at.weight_decay)
            torch._foreach_add_(values, moved, alpha=-lr)
            moved = values
        elif self.moves:
            moved = torch._foreach_add(at.values, moved, alpha=-lr)
        pairs = zip(parameters, moved, strict=True)
        moved = [round_values(self.group, p, values, at.step) for p, values in pairs]
        # State first: an entry may become the values, or the old value of another entry.
        olds = {id(old) for old, _ in self.writes}
        writes = [
            (old, new.clone() if new is not old and id(new) in olds else new)
            for old, new in self.writes
        ]
        skip = is_skipped(self.optimizer)
        for old, new in [*writes, *zip(shards, moved, strict=True)]:
            keep_or_write(skip, old, new)

    def _at(self, parameters: list[Tensor], shards: Tensors, holders: Sequence[Holder]) -> At:
        gradients = [scaled_gradient(self.optimizer, parameter) for parameter in parameters]
        device, step = shards[0].device, self.group.get("state_step", 0) + 1
        counts = []
        if "step" in self.reads:
            counts = [self._entry(*p, "step", number) for p in zip(holders, shards, strict=True)]
            self.writes += [(count, count + 1) for count in counts]
        return At(
            # A parameter without a gradient in some step has a smaller count.
            step=torch.stack(counts).amax() + 1 if counts else UNREAD,
            lr=torch.full((), float(self.group["lr"]), dtype=torch.float64, device=device),
            values=[v.to(g.dtype) for v, g in zip(shards, gradients, strict=True)],
            gradients=gradients,
            total=partial(total_over_shards, parameters),
            every=lambda steps: step % steps == 0,
            weight_decay=self.group["weight_decay"],
        )

    def _run(
        self, chain: Chain, holders: Sequence[Holder], directions: Tensors, likes: Tensors, at: At
    ) -> Tensors:
        """Apply transforms, and collect their new state; the first is made from ``likes``."""
        for each in chain:
            state = {
                name: [self._entry(*pair, name, make) for pair in zip(holders, likes, strict=True)]
                for name, make in each.state.items()
            }
            directions, new = run(each, directions, state, at)
            for name, entries in state.items():
                self.writes += zip(entries, new[name], strict=True)
        return directions

    def _entry(
        self, holder: Holder, like: Tensor, name: str, make: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return this rank's part of a state entry, or the entry of a matrix that it owns."""
        parameter, number = holder
        held: dict[Any, Any] = self.optimizer.state[parameter]
        key: Any = name
        if number is not None:
            held, key = held.setdefault(name, {}), number
        if key not in held:
            held[key] = made = make(like).clone()  # not the parameter itself
            if number is None and made.shape == like.shape and isinstance(parameter, DTensor):
                held[key] = torch.empty_like(parameter, dtype=made.dtype)
                local(held[key]).copy_(made)
        if number is not None or not held[key].ndim:  # a checkpoint may load it on the host
            held[key] = held[key].to(like.device)
        return local(held[key])

    def _on_owners(
        self, bundle: Bundle, directions: Tensors, values: Tensors, gradients: Tensors, at: At
    ) -> Tensors:
        """Send directions to the owners, apply whole transforms there, and send them back."""
        like, home = bundle.parameters[0], directions[0].device
        wider, rows = directions[0].dtype, self.group["rows"] or like.shape[-2:-1]
        where = like.device_mesh.device_type if isinstance(like, DTensor) else home  # offloaded

        def gather(shards: Tensors, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
            stacked = torch.stack([shard.to(where, dtype or wider) for shard in shards])
            return to_owners(stacked.flatten(0, -3), bundle.legs).split([*rows], dim=-2)

        sent = {"values": values, "gradients": gradients}
        read = {name: gather(s) for name, s in sent.items() if f"whole {name}" in self.reads}
        # What no transform reads stays on the host: a copy would synchronise.
        step, lr = (one if one is UNREAD else one.to(where) for one in (at.step, at.lr))
        # Whole matrices need no sum over shards.
        at = at._replace(step=step, lr=lr, total=list, values=[], gradients=[])
        back, done = self.middle[-1].dtype or wider, []
        for part, matrices in enumerate(gather(directions, self.middle[0].dtype)):
            if len(matrices):
                holders = [(p, number * len(rows) + part) for p, number in bundle.owned]
                zeros = [matrices.new_zeros(matrices.shape[1:], dtype=wider)] * len(holders)
                its = at._replace(**{name: whole[part].unbind() for name, whole in read.items()})
                made = self._run(self.middle, holders, matrices.unbind(), zeros, its)
                matrices = torch.stack([*made])
            done.append(matrices.to(back))
        shared = from_owners(done[0] if len(done) == 1 else torch.cat(done, -2), bundle.legs)
        back = wider if self.after else back  # else it is added to wider values
        return shared.view(len(directions), *directions[0].shape).to(home, back).unbind()


def scaled_gradient(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient in float32 or wider, divided by ``grad_scale``.

    A missing gradient is zeros, as ``accumulate`` sets it for unused parameters.
    """
    part = torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
    part, scale = part.to(wide(part.dtype)), vars(optimizer).get("grad_scale")
    return part if scale is None else part / scale.to(part.dtype)


def is_skipped(optimizer: Optimizer) -> Tensor | None:
    """Return whether the step is bad, ``[]`` bool on the device; None without ``found_inf``."""
    found_inf = vars(optimizer).get("found_inf")
    return None if found_inf is None else found_inf != 0


def keep_or_write(skip: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Write a new value, or keep the old one if the step is bad, in place.

    Args:
        skip: What ``is_skipped`` returned.
        old: This rank's part of a parameter or of its state.
        new: ``[...]`` as ``old``; rounded to its dtype.
    """
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip.to(old.device), old, new.to(old.dtype), out=old)
