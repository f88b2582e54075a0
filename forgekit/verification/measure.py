"""What one rank does for ``verify``: a recipe's gradient, loss and three SGD steps, in float64.

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
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forgekit.data.batch import IGNORED
from forgekit.data.groups import groups
from forgekit.mesh import DIMENSIONS, MeshSpec, resolve_sizes
from forgekit.model.lora import LoraLinear
from forgekit.parallel.agreement import exchange
from forgekit.parallel.fsdp import fsdp_modules
from forgekit.parallel.layout import full
from forgekit.state import TrainState
from forgekit.steps.accumulate import LossFn, accumulate
from forgekit.steps.clip import clip
from forgekit.steps.experts import StepRouters, rebalance
from forgekit.steps.gradients import gradients
from forgekit.steps.micro_batch import check_loss, compute_loss
from forgekit.steps.totals import reduce_totals
from forgekit.steps.update import update

STEPS = 3
LEARNING_RATE = 0.1

Setup = Callable[[MeshSpec], Any]
Names = dict[str, str]
"""Names of parameters, each with the digest of a tensor."""


@attrs.frozen(kw_only=True)
class Given:
    """What all layouts start from and see.

    Attributes:
        start: Parameters before the first step.
        batches: Digests of the micro-batches of each step, over all data-parallel ranks: number
            ``m * R + r`` is micro-batch ``m`` of rank ``r`` of ``R``.
    """

    start: Names
    batches: list[list[str]]


@attrs.frozen(kw_only=True)
class Task:
    """What a rank is asked for.

    Attributes:
        setup: Builds a recipe's record for a layout.
        spec: The layout; each size is given.
        folder: Where tensors are kept.
        mask: Whether labels are masked, so that micro-batches differ in their targets.
    """

    setup: Setup
    spec: MeshSpec
    folder: Path
    mask: bool


@attrs.define(kw_only=True)
class Found:
    """What a rank found.

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


class Tensors:
    """Tensors and micro-batches in a folder, each under a digest of its content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, value: Tensor | TensorDictBase) -> str:
        """Write a tensor unless it is there, and return its digest."""
        content = _content(value)
        name = _digest(content)
        path = self._folder / name
        if not path.exists():
            # Ranks write the same tensor at the same time; the rename makes it appear whole.
            part = path.with_name(f"{name}.{os.getpid()}")
            part.write_bytes(content)
            part.rename(path)
        return name

    def load(self, digest: str) -> Any:
        """Read what was saved."""
        return torch.load(self._folder / digest, weights_only=False)


def _content(value: Tensor | TensorDictBase) -> bytes:
    """Bytes that are the same for equal values, whatever their strides and storages were."""
    buffer = io.BytesIO()
    torch.save(value.detach().cpu().contiguous().clone(), buffer)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def measure_layout(task: Task, given: Given | None) -> Found:
    """Take three SGD steps in a layout as a run takes its own.

    Args:
        task: What to do.
        given: What to start from; None for the first layout, whose start and batches all take.

    Returns:
        What this rank found; gradients and parameters are full tensors.
    """
    kept = Tensors(task.folder)
    record, state, start = _build(task, given)
    batches = _pull(record, task) if given is None else _share(task, given, kept)
    digests = [[kept.save(batch) for batch in step] for step in batches]
    found = Found(start=start, batches=digests)
    for number, micro_batches in enumerate(batches):
        totals = reduce_totals(accumulate(state, micro_batches, record.loss_fn), state)
        correction = clip(totals, max_norm=math.inf)
        if number == 0:
            means = gradients(state, totals)
            found.gradients = {n: kept.save(full(means[n])) for n in _trained(state.model)}
            found.loss = float(totals["loss"] / totals["targets"])
            found.norm = float(correction.grad_norm)
        state = update(state, correction, lr=LEARNING_RATE, totals=totals, total=STEPS)
    found.after = _full_parameters(state.model, kept)
    return found


def measure_plainly(task: Task, given: Given, merge: bool) -> Found:
    """Do the same in one process with plain autograd.

    Args:
        task: What to do; its layout is one rank.
        given: What to start from.
        merge: Whether the first step is done once more with its micro-batches joined.

    Returns:
        What was found.
    """
    kept = Tensors(task.folder)
    record, state, start = _build(task, given)
    trained, random = _trained(state.model), torch.get_rng_state()
    found = Found(start=start, batches=given.batches)
    for number, digests in enumerate(given.batches):
        batches = [kept.load(digest) for digest in digests]
        if number == 0 and merge and len(joined := list(_join(batches))) < len(batches):
            _backward(state.model, joined, record.loss_fn)
            found.merged = {name: kept.save(full(p.grad)) for name, p in trained.items()}
        routers = StepRouters(state.model, torch.ones(()), state.targets.device)
        with routers.noting():
            loss = _backward(state.model, batches, record.loss_fn)
        if number == 0:
            found.loss = loss
            found.gradients = {name: kept.save(full(p.grad)) for name, p in trained.items()}
            squares = (float(full(p.grad).square().sum()) for p in trained.values())
            found.norm = math.sqrt(sum(squares))
        with torch.no_grad():
            for parameter in trained.values():
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)  # pyright: ignore[reportArgumentType]
        rebalance(state.model, routers.sums(), torch.ones((), dtype=torch.bool), number, STEPS)
    found.after = _full_parameters(state.model, kept)
    found.is_random = not torch.equal(random, torch.get_rng_state())
    return found


def _backward(model: nn.Module, batches: Iterable[TensorDictBase], loss_fn: LossFn) -> float:
    """Leave the gradient of the token-mean loss in the parameters, and return that loss."""
    model.zero_grad()
    total, targets = 0.0, 0.0
    for batch in batches:
        loss = check_loss(compute_loss(model, batch, loss_fn))
        loss.sum.backward()
        total, targets = total + float(loss.sum), targets + float(loss.count)
    targets = targets or math.nan  # without any there is nothing to compare
    for parameter in _trained(model).values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= targets
    return total / targets


def _build(task: Task, given: Given | None) -> tuple[Any, TrainState, Names]:
    """Run the setup; its state gets float64, plain SGD, no dropout, and the given parameters.

    Returns:
        The recipe's record, the state, and the parameters that setup made.
    """
    # Before the setup: what it makes without a dtype (buffers, rotary tables) is float64 at once.
    torch.set_default_dtype(torch.float64)
    record = task.setup(task.spec)
    for name in ("state", "loss_fn", "loader"):
        if not hasattr(record, name):
            raise TypeError(
                f"setup returned a {type(record).__name__} without {name!r}; verify needs a record "
                "with state, loss_fn and loader, such as recipes/pretrain.py returns."
            )
    state: TrainState = record.state
    _check_mesh(state, task.spec)
    _check_precision(state.model)
    state.model.double()
    _stop_dropout(state.model)
    kept = Tensors(task.folder)
    start = _full_parameters(state.model, kept)
    if given is not None:
        _copy_start(state.model, kept, given.start)
    optimizer = torch.optim.SGD(list(_trained(state.model).values()), lr=LEARNING_RATE)
    return record, attrs.evolve(state, optimizer=optimizer), start


def _check_mesh(state: TrainState, spec: MeshSpec) -> None:
    if state.mesh is None:  # a mesh that was forgotten shows in what is found
        return
    names = state.mesh.mesh_dim_names or ()
    built = dict(zip(names, state.mesh.shape, strict=True))
    asked = {name: getattr(spec, name) for name in DIMENSIONS}
    if any(built.get(name, 1) != size for name, size in asked.items()):
        raise ValueError(
            f"setup built a mesh of {built} and was asked for {asked}; give build_mesh what it "
            "is passed: fk.build_mesh(config.mesh)."
        )


def _check_precision(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        dtype = module._get_fsdp_state()._mp_policy.param_dtype
        if dtype not in (None, torch.float64):
            raise ValueError(
                f"setup asks parallelize to compute in {dtype}, and verify compares in float64; "
                'take precision from the configuration, so that verify can set it to "fp32".'
            )


def _stop_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: of torch's modules, of adapters, and numbers that are called so."""
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


def _full_parameters(model: nn.Module, kept: Tensors) -> Names:
    return {name: kept.save(full(p)) for name, p in model.named_parameters()}


@torch.no_grad()
def _copy_start(model: nn.Module, kept: Tensors, start: Names) -> None:
    """Give each parameter the value that all layouts start from."""
    for name, parameter in model.named_parameters():
        if name not in start:
            continue  # it shows as a parameter that the other layout does not have
        full = kept.load(start[name])
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            # None: every rank has the full tensor and takes its shard without a broadcast.
            full = distribute_tensor(full, mesh, placements, src_data_rank=None)
        parameter.copy_(full)


def _pull(record: Any, task: Task) -> list[list[TensorDictBase]]:
    """This rank's micro-batches of three steps from the recipe's loader, masked if asked for."""
    count = getattr(record, "micro_batches", 1)
    rank, world = data_rank(task.spec, int(os.environ["RANK"]))
    due = itertools.islice(groups(record.loader, count), STEPS)
    steps = [[batch.clone() for batch in group] for group in due]
    if len(steps) < STEPS:
        raise ValueError(
            f"the loader has micro-batches for {len(steps)} steps and verify takes {STEPS}; use "
            "a smaller global_batch_size, or more data."
        )
    for batches in steps if task.mask else []:
        for number, batch in enumerate(batches):
            _mask(batch, number * world + rank)
    _check_shared(steps, task.spec)
    return steps


def _check_shared(steps: list[list[TensorDictBase]], spec: MeshSpec) -> None:
    """Raise, on every rank, if ranks that hold parts of one model have read different rows."""
    if not dist.is_initialized():
        return
    # Compared on every rank, so that all raise and none waits in a collective of the step.
    everyone = exchange([[_digest(_content(batch)) for batch in step] for step in steps])
    readers: dict[int, int] = {}
    for rank, digests in enumerate(everyone):
        first = readers.setdefault(data_rank(spec, rank)[0], rank)
        if digests != everyone[first]:
            raise ValueError(
                f"ranks {first} and {rank} hold parts of one model and must read the same rows, "
                "but read different ones. Take the loader's rank and world from "
                "fk.data_ranks(mesh), and seed nothing by the process's rank."
            )


def world_of(spec: MeshSpec) -> int:
    """Return the number of ranks of a layout."""
    return math.prod(getattr(spec, name) for name in DIMENSIONS)


def data_rank(spec: MeshSpec, rank: int) -> tuple[int, int]:
    """Data-parallel rank and world of a rank; arithmetic, whatever mesh a recipe has built."""
    _, replicate, shard, context, tensor = resolve_sizes(spec, world_of(spec))
    return rank // (context * tensor) % (replicate * shard), replicate * shard


def _mask(batch: TensorDictBase, number: int) -> None:
    """Mask labels, more in one micro-batch than in the next: equal counts would hide mistakes."""
    labels = batch.get("labels", None)
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return
    generator = torch.Generator().manual_seed(number)
    share = (1 + number % 4) / 8
    is_masked = torch.rand(labels.shape, generator=generator) < share
    is_masked[:, -1] = False  # each row keeps one
    batch["labels"] = labels.masked_fill(is_masked, IGNORED)


def _share(task: Task, given: Given, kept: Tensors) -> list[list[TensorDictBase]]:
    """This rank's part of the micro-batches that all layouts see."""
    rank, world = data_rank(task.spec, int(os.environ["RANK"]))
    return [[kept.load(digest) for digest in step[rank::world]] for step in given.batches]


def _join(batches: list[TensorDictBase]) -> Iterator[TensorDictBase]:
    """Micro-batches of equal shapes as one."""
    alike: dict[Any, list[TensorDictBase]] = {}
    for batch in batches:
        shapes = tuple((str(k), v.shape[1:]) for k, v in sorted(batch.items(True, True), key=str))
        alike.setdefault(shapes, []).append(batch)
    for same in alike.values():
        yield TensorDict.cat(same)
