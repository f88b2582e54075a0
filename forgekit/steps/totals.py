"""The sums of a step, and the one collective that adds them over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forgekit.parallel.layout import layout_of, size_of
from forgekit.state import TrainState
from forgekit.steps.losses import Loss

__all__ = ["LossSums", "Totals", "mean_metrics", "reduce_losses", "reduce_totals"]

_agreed: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


@attrs.frozen
class Totals:
    """Sums over a step's targets: this rank's until ``reduce_totals``, then everybody's.

    Attributes:
        sums: TensorDict of ``[]`` float64: ``targets``, ``loss``, ``loss_scale``, each metric's
            ``sum`` and ``count`` under ``metrics``, votes such as ``stop``, and, once reduced,
            ``grad_sq``, the squared norm of the raw gradient.
        samples: Rows consumed globally in this step; padding does not count.
    """

    sums: TensorDictBase
    samples: int = 0

    @classmethod
    def of(cls, *, samples: int = 0, **sums: float | Tensor) -> Self:
        """Build totals from numbers, for tests and hand-written loops.

        Examples:
            >>> Totals.of(targets=8, loss=2.0)["targets"]
            tensor(8., dtype=torch.float64)
        """
        values = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in sums.items()}
        return cls(TensorDict({**values, "metrics": TensorDict({}, [])}, []), samples)

    def __getitem__(self, key: str) -> Tensor:
        """Read one sum.

        Raises:
            KeyError: If it is not there; ``grad_sq`` comes with ``reduce_totals``.
        """
        try:
            return self.sums[key]
        except KeyError:
            raise KeyError(
                f"totals have no {key!r}; they have {sorted(self.sums.keys())}. "
                "forgekit.reduce_totals(totals, state) adds the gradient's norm."
            ) from None

    def plus(self, **sums: Tensor) -> Self:
        """Return totals with further sums, such as a vote."""
        return type(self)(TensorDict({**dict(self.sums.items()), **sums}, []), self.samples)


class LossSums:
    """The losses of a step, added up in float64: float32 would lose integers above 2**24."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.losses: list[Tensor] = []
        self.counts: list[Tensor | float] = []
        self.metrics: dict[str, tuple[list[Any], list[Any]]] = {}

    def add(self, loss: Loss, *, rows: int) -> None:
        """Take one micro-batch's loss; nothing is computed yet."""
        self.rows += rows
        self.losses.append(loss.sum.detach())
        self.counts.append(loss.count)
        for name, metric in loss.metrics.items():
            pair = metric if isinstance(metric, tuple | list) else (metric, 1)
            for values, value in zip(self.metrics.setdefault(name, ([], [])), pair, strict=True):
                values.append(value)

    def totals(self, loss_scale: Tensor, samples: int) -> Totals:
        """Add everything up."""
        metrics = {
            name: TensorDict({"sum": self._total(sums), "count": self._total(counts)}, [])
            for name, (sums, counts) in self.metrics.items()
        }
        values = {
            "targets": self._total(self.counts),
            "loss": self._total(self.losses),
            "loss_scale": loss_scale.double(),
            "metrics": TensorDict(metrics, []),
        }
        return Totals(TensorDict(values, []), samples)

    def _total(self, values: Iterable[Tensor | float]) -> Tensor:
        numbers = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}  # stacked together they might be rounded
        for value in values:
            if not isinstance(value, Tensor):
                numbers += value
            elif value.ndim:
                raise ValueError(
                    f"a loss has a sum, count or metric of shape {tuple(value.shape)}; each is a "
                    "number or a 0-d tensor. Sum it first."
                )
            else:
                by_dtype.setdefault(value.dtype, []).append(value)
        parts = [torch.stack(values).sum(dtype=torch.float64) for values in by_dtype.values()]
        if numbers or not parts:
            parts.append(torch.full((), numbers, dtype=torch.float64, device=self.device))
        total = sum(parts[1:], parts[0]).detach()
        if total.device == self.device:
            return total
        # Added, not moved: an accelerator takes a number of the host without a wait.
        return torch.zeros((), dtype=torch.float64, device=self.device) + total


def reduce_totals(totals: Totals, state: TrainState) -> Totals:
    """Add a step's sums, the squared gradient norm and the votes over all ranks.

    The one collective of a step, an all-reduce of a float64 vector. Weights of ownership make a
    plain sum right: losses and counts come from one tensor-parallel rank of the last pipeline
    stage, and a parameter's shard counts as one over the number of ranks that hold it.

    Args:
        totals: What ``accumulate`` returned, with votes added where there are any.
        state: The state whose gradients were accumulated; not changed.

    Returns:
        Totals that are the same on every rank, with ``grad_sq``.

    Raises:
        ValueError: If ranks bring different names, or names change from one step to the next:
            the vector would be added up across different things.
    """
    return _sum_over_ranks(_agree(with_gradient_square(totals, state), state), state)


def with_gradient_square(totals: Totals, state: TrainState) -> Totals:
    """Add ``grad_sq``, this rank's share of it."""
    return totals.plus(grad_sq=_gradient_square(state))


def reduce_losses(totals: Totals, state: TrainState) -> Totals:
    """Add the sums of an evaluation over all ranks, after comparing their names.

    Raises:
        ValueError: On every rank, if names or numbers of rows differ.
    """
    keys = _compare_ranks(totals, state)
    return _sum_over_ranks(_filled(totals, keys), state)


def mean_metrics(totals: Totals) -> dict[str, Tensor]:
    """Divide the sums of a loss function's own metrics by their counts.

    Args:
        totals: Reduced totals.

    Returns:
        ``[]`` float64 by name, and of each ``<what>/loss`` its count as ``<what>/targets``.
    """
    means: dict[str, Tensor] = {}
    for name, pair in totals.sums["metrics"].items():
        means[name] = pair["sum"] / pair["count"]
        if name.endswith("/loss"):
            means[name.removesuffix("loss") + "targets"] = pair["count"]
    return means


def _sum_over_ranks(totals: Totals, state: TrainState) -> Totals:
    """All-reduce one vector of everything but the loss scale, which all ranks share already."""
    if _size(state) == 1:
        return totals
    sums = totals.sums.copy()
    keys = _summed_keys(totals)
    vector = torch.stack([sums[key] for key in keys])
    if not layout_of(state.model).owns_loss:
        owned = [0.0 if _is_loss(key) else 1.0 for key in keys]
        vector = vector * torch.tensor(owned, dtype=vector.dtype, device=vector.device)
    dist.all_reduce(vector)
    for key, value in zip(keys, vector.unbind(), strict=True):
        sums[key] = value
    return attrs.evolve(totals, sums=sums)


def _compare_ranks(totals: Totals, state: TrainState) -> list[Any]:
    """Make sure that all ranks are about to add up the same things; a collective of objects.

    Returns:
        The keys that all ranks add up. Stages before the last know no metrics.
    """
    knows_names = _knows_names(state)
    mine = _summed_keys(totals), totals.samples, knows_names
    world = _size(state)
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    first, (expected, _, _) = next(
        (rank, theirs) for rank, theirs in enumerate(everyone) if theirs[2]
    )
    for rank, (keys, samples, knows) in enumerate(everyone):
        if knows and keys != expected:
            raise ValueError(
                f"rank {rank} reports other sums than rank {first}: "
                f"{_difference(expected, keys)}. "
                "Report the same metrics on every rank; use (0.0, 0) without observations."
            )
        if samples != everyone[0][1]:
            raise ValueError(
                f"rank {rank} counts {samples} samples in a step and rank 0 {everyone[0][1]}; "
                "every rank must bring as many rows. Fill up with rows whose labels are -100."
            )
    return expected


def _filled(totals: Totals, keys: Iterable[Any]) -> Totals:
    """Add zeros for sums that other ranks have, as a pipeline's last stage does."""
    sums = totals.sums.clone()
    for key in set(keys) - set(_summed_keys(totals)):
        sums[key] = torch.zeros_like(totals["loss"])
    return attrs.evolve(totals, sums=sums)


def _knows_names(state: TrainState) -> bool:
    stages = layout_of(state.model).stages
    return stages is None or stages.has_last


def _size(state: TrainState) -> int:
    return state.mesh.size() if state.mesh is not None else 1


def _is_loss(key: str | tuple[str, ...]) -> bool:
    return key in ("targets", "loss") or key[0] == "metrics"


def _summed_keys(totals: Totals) -> list[Any]:
    keys = (key for key in totals.sums.keys(True, True) if key != "loss_scale")
    return sorted(keys, key=lambda key: key if isinstance(key, tuple) else (key,))


def _gradient_square(state: TrainState) -> Tensor:
    """This rank's share of the squared L2 norm of the gradient that is due, ``[]`` float64."""
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = _size(state) // size_of(state.mesh, "pp")
    by_owners: dict[int, list[Tensor]] = {}
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                shard, owners = _shard_and_owners(gradient, world)
                by_owners.setdefault(owners, []).append(shard)
    total = torch.zeros((), dtype=torch.float64, device=state.targets.device)
    for owners, shards in by_owners.items():
        norms = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64))
        total = total + norms.dot(norms) / owners
    return total


def _shard_and_owners(gradient: Tensor, world: int) -> tuple[Tensor, int]:
    """The local piece of a gradient and how many ranks hold the same piece."""
    if not isinstance(gradient, DTensor):
        return gradient, world
    mesh = gradient.device_mesh
    owners = world // mesh.size()
    for size, placement in zip(mesh.shape, gradient.placements, strict=True):
        owners *= size if isinstance(placement, Replicate) else 1
    return gradient.to_local(), owners


def _agree(totals: Totals, state: TrainState) -> Totals:
    """Compare with the other ranks at a model's first step, and with that step later."""
    known = _agreed.get(state.model)
    if known is None:
        known = _agreed[state.model] = _compare_ranks(totals, state)
    if not _knows_names(state):
        return _filled(totals, known)
    keys = _summed_keys(totals)
    if known != keys:
        if _size(state) > 1:
            # The others are on their way into the collective: meet them there, with NaN, so that
            # they end with a bad step instead of waiting for this rank.
            dist.all_reduce(totals["targets"].new_full((len(known),), torch.nan))
        raise ValueError(
            f"the names of a step's sums changed: {_difference(known, keys)}. Report the same "
            "metrics in every step; use (0.0, 0) for a metric without observations."
        )
    return totals


def _difference(known: Iterable[Any], new: Iterable[Any]) -> str:
    before, now = {_name(key) for key in known}, {_name(key) for key in new}
    return f"missing {sorted(before - now)}, new {sorted(now - before)}"


def _name(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)
