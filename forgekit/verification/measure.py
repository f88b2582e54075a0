"""A rank's part of ``verify``: a recipe's gradient, loss and three SGD steps, in float64.

A rank of a layout takes its steps as a run does. The one process that it is compared with uses
nothing of the step: it calls the loss function for each micro-batch, runs a backward pass, divides
by the number of targets, and subtracts; only the balance of experts is moved by the step's own
function. Full tensors go into a folder under the name of their content, so that what all ranks
agree on is written once and compared by name.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forgekit.data.batch import IGNORED
from forgekit.data.groups import groups
from forgekit.mesh import DIMENSIONS, MeshSpec, resolve_sizes
from forgekit.model.lora import LoraLinear
from forgekit.parallel.fsdp import fsdp_modules
from forgekit.state import TrainState
from forgekit.steps.accumulate import LossFn, accumulate
from forgekit.steps.audit.first_step import audit
from forgekit.steps.clip import clip
from forgekit.steps.experts import StepRouters, rebalance
from forgekit.steps.gradients import gradients
from forgekit.steps.micro_batch import compute_loss
from forgekit.steps.totals import reduce_totals
from forgekit.steps.update import update
from forgekit.tensors import full

STEPS = 3
LEARNING_RATE = 0.1

Setup = Callable[[MeshSpec], Any]
Names = dict[str, str]
"""Digests of tensors by parameter name."""


@attrs.frozen(kw_only=True)
class RankJob:
    """The job of a rank.

    Attributes:
        setup: Builds a recipe's record for a layout.
        spec: The layout; each size is given.
        folder: Where tensors are kept.
        start: Parameters before the first step; None in the first layout, whose own all start from.
        batches: Digests of the micro-batches of each step, over all data-parallel ranks: number
            ``m * R + r`` is micro-batch ``m`` of rank ``r`` of ``R``. None as for ``start``.
    """

    setup: Setup
    spec: MeshSpec
    folder: Path
    start: Names | None = None
    batches: list[list[str]] | None = None


@attrs.define(kw_only=True)
class RankResult:
    """The result of a rank.

    Attributes:
        start: Parameters that setup made.
        batches: Digests of this rank's micro-batches of each step.
        gradients: Token-mean gradients of the first step.
        after: Parameters after three SGD steps.
        loss: Token-mean loss of the first step.
        norm: Norm of its gradient.
        merged: Gradients with the micro-batches of equal shapes joined to one; None if there are
            none to join, or it was not asked for.
        is_random: Whether random numbers were drawn in forward or backward.
    """

    start: Names
    batches: list[list[str]]
    gradients: Names = attrs.field(factory=dict)
    after: Names = attrs.field(factory=dict)
    loss: float = math.nan
    norm: float = math.nan
    merged: Names | None = None
    is_random: bool = False


def keep(folder: Path, value: Tensor | TensorDictBase) -> str:
    """Store a tensor or batch in a folder by its digest, and return the digest."""
    buffer = io.BytesIO()  # of a clone: equal values give equal bytes whatever their strides
    torch.save(value.detach().cpu().contiguous().clone(), buffer)
    digest = hashlib.blake2b(buffer.getvalue(), digest_size=16).hexdigest()
    if not (folder / digest).exists():
        # Ranks may write one tensor concurrently; the rename is atomic.
        part = folder / f"{digest}.{os.getpid()}"
        part.write_bytes(buffer.getvalue())
        part.rename(folder / digest)
    return digest


def kept(folder: Path, digest: str) -> Any:
    """Load a stored tensor or batch."""
    return torch.load(folder / digest, weights_only=False)


def measure_layout(job: RankJob) -> RankResult:
    """Take three SGD steps in a layout, as a run does.

    Args:
        job: What to do.

    Returns:
        What this rank computed; gradients and parameters are full tensors.
    """
    record, state, start = _build(job)
    batches = _pull(record, job) if job.batches is None else _share(job, job.batches)
    digests = [[keep(job.folder, batch) for batch in step] for step in batches]
    result = RankResult(start=start, batches=digests)
    audit(state, batches[0][0], record.loss_fn)
    for number, micro_batches in enumerate(batches):
        totals = reduce_totals(accumulate(state, micro_batches, record.loss_fn), state)
        correction = clip(totals, max_norm=math.inf)
        if number == 0:
            means = gradients(state, totals)
            result.gradients = {n: keep(job.folder, full(means[n])) for n in _trained(state.model)}
            result.loss = float(totals["loss"] / totals["targets"])
            result.norm = float(correction.grad_norm)
        state = update(state, correction, lr=LEARNING_RATE, totals=totals, total=STEPS)
    result.after = _full_parameters(state.model, job.folder)
    return result


def measure_plainly(job: RankJob, merge: bool) -> RankResult:
    """Take the same steps in one process with plain autograd.

    Args:
        job: What to do; its layout is one rank.
        merge: Whether the first step is done once more with its micro-batches joined.

    Returns:
        What was computed.
    """
    record, state, start = _build(job)
    trained, random = _trained(state.model), torch.get_rng_state()
    result = RankResult(start=start, batches=[])
    for number, digests in enumerate(job.batches or ()):
        batches = [kept(job.folder, digest) for digest in digests]
        if number == 0 and merge and len(joined := list(_join(batches))) < len(batches):
            plain_backward(state.model, joined, record.loss_fn)
            result.merged = {name: keep(job.folder, full(p.grad)) for name, p in trained.items()}
        routers = StepRouters(state.model.modules(), torch.ones(()), state.targets.device)
        with routers.recording():
            loss = plain_backward(state.model, batches, record.loss_fn)
        if number == 0:
            result.loss = loss
            result.gradients = {name: keep(job.folder, full(p.grad)) for name, p in trained.items()}
            squares = (float(full(p.grad).square().sum()) for p in trained.values())
            result.norm = math.sqrt(sum(squares))
        with torch.no_grad():
            for parameter in trained.values():
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)  # pyright: ignore[reportArgumentType]
        rebalance(state.model, routers.sums(), torch.ones((), dtype=torch.bool), number, STEPS)
    result.after = _full_parameters(state.model, job.folder)
    result.is_random = not torch.equal(random, torch.get_rng_state())
    return result


def plain_backward(model: nn.Module, batches: Iterable[TensorDictBase], loss_fn: LossFn) -> float:
    """Compute the gradient of the token-mean loss by autograd alone, into ``.grad``.

    This is what every layout is held to, by ``verify`` and by the library's own tests.

    Args:
        model: One process's whole model.
        batches: All micro-batches of a step, of all ranks.
        loss_fn: As in a step.

    Returns:
        The loss; without any targets 0, and so is the gradient.
    """
    model.zero_grad()
    total, targets = 0.0, 0.0
    for batch in batches:
        loss = compute_loss(model, batch, loss_fn)
        loss.sum.backward()
        total, targets = total + float(loss.sum.detach()), targets + float(loss.count)
    targets = targets or 1.0
    for parameter in _trained(model).values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= targets
    return total / targets


def _build(job: RankJob) -> tuple[Any, TrainState, Names]:
    """Run the setup in float64 with plain SGD, no dropout, and given parameters.

    Returns:
        The recipe's record, the state, and the parameters that setup made.
    """
    # Before the setup, so that tensors without a dtype (buffers, rotary tables) are float64.
    torch.set_default_dtype(torch.float64)
    record = job.setup(job.spec)
    state: TrainState = record.state
    _check_mesh(state, job.spec)
    _check_precision(state.model)
    state.model.double()
    _stop_dropout(state.model)
    start = _full_parameters(state.model, job.folder)
    for name, parameter in state.model.named_parameters():
        if job.start is not None and name in job.start:  # else the difference is measured
            _copy(parameter, kept(job.folder, job.start[name]))
    optimizer = torch.optim.SGD(list(_trained(state.model).values()), lr=LEARNING_RATE)
    return record, attrs.evolve(state, optimizer=optimizer), start


def _check_mesh(state: TrainState, spec: MeshSpec) -> None:
    if state.mesh is None:  # a forgotten mesh shows in the gradients
        return
    names = state.mesh.mesh_dim_names or ()
    built = dict(zip(names, state.mesh.shape, strict=True))
    asked = {name: getattr(spec, name) for name in DIMENSIONS}
    if any(built.get(name, 1) != size for name, size in asked.items()):
        raise ValueError(
            f"setup built a mesh of {built}, not {asked} as asked; use fk.build_mesh(config.mesh)."
        )


def _check_precision(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        dtype = module._get_fsdp_state()._mp_policy.param_dtype
        if dtype not in (None, torch.float64):
            raise ValueError(
                f"setup asks parallelize to compute in {dtype}, but verify compares in float64; "
                'take precision from the configuration, where verify sets "fp32".'
            )


def _stop_dropout(model: nn.Module) -> None:
    """Set all dropout to 0: torch's modules, adapters, and attributes of that name."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            evolved = {k: attrs.evolve(a, dropout=0.0) for k, a in module.adapters.items()}
            module.adapters = evolved
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _full_parameters(model: nn.Module, folder: Path) -> Names:
    return {name: keep(folder, full(p)) for name, p in model.named_parameters()}


@torch.no_grad()
def _copy(parameter: nn.Parameter, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        # None: every rank has the full tensor and takes its shard without a broadcast.
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    parameter.copy_(value)


def _pull(record: Any, job: RankJob) -> list[list[TensorDictBase]]:
    """Pull this rank's micro-batches of three steps from the recipe's loader, masked."""
    rank, world = data_rank(job.spec, int(os.environ["RANK"]))
    due = itertools.islice(groups(record.loader, getattr(record, "micro_batches", 1)), STEPS)
    steps = [[batch.clone() for batch in group] for group in due]
    if len(steps) < STEPS:
        raise ValueError(
            f"the loader has micro-batches for {len(steps)} steps, but verify takes {STEPS}; use "
            "a smaller global_batch_size, or more data."
        )
    for batches in steps:
        for number, batch in enumerate(batches):
            _mask(batch, number * world + rank)
    return steps


def world_of(spec: MeshSpec) -> int:
    """Return the number of ranks of a layout."""
    return math.prod(getattr(spec, name) for name in DIMENSIONS)


def data_rank(spec: MeshSpec, rank: int) -> tuple[int, int]:
    """Return a rank's data-parallel rank and world by arithmetic, whatever mesh a recipe builds."""
    _, replicate, shard, context, tensor = resolve_sizes(spec, world_of(spec))
    return rank // (context * tensor) % (replicate * shard), replicate * shard


def _mask(batch: TensorDictBase, number: int) -> None:
    """Mask labels unevenly over micro-batches: equal counts would hide mistakes."""
    labels = batch.get("labels", None)
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return
    generator = torch.Generator().manual_seed(number)
    share = (1 + number % 4) / 8
    is_masked = torch.rand(labels.shape, generator=generator) < share
    is_masked[:, -1] = False  # each row keeps a label
    batch["labels"] = labels.masked_fill(is_masked, IGNORED)


def _share(job: RankJob, batches: list[list[str]]) -> list[list[TensorDictBase]]:
    """Return this rank's part of the micro-batches common to all layouts."""
    rank, world = data_rank(job.spec, int(os.environ["RANK"]))
    return [[kept(job.folder, digest) for digest in step[rank::world]] for step in batches]


def _join(batches: list[TensorDictBase]) -> Iterator[TensorDictBase]:
    """Join micro-batches of equal shapes."""
    alike: dict[Any, list[TensorDictBase]] = {}
    for batch in batches:
        shapes = tuple((str(k), v.shape[1:]) for k, v in sorted(batch.items(True, True), key=str))
        alike.setdefault(shapes, []).append(batch)
    for same in alike.values():
        yield TensorDict.cat(same)
