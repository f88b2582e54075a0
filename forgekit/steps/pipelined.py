"""One step, or one evaluation, through the stages of a pipeline, with the same loss function.

``loss_fn(model, batch)`` is called twice. The first time, on every rank, ``model`` notes what it
is called with and leaves: these are the arguments for the stages. The second time, on the last
stage, ``model`` gives the stage's output. Each rank gives them to its own stages, and a micro-batch
is pulled when this rank's first stage is about to work on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.parallel.agreement import raise_together
from forgekit.parallel.fsdp import (
    FsdpModules,
    Sync,
    fsdp_modules,
    release,
    reset_iteration,
    sum_gradients,
    widen_accumulators,
)
from forgekit.parallel.pipeline.stages import Stages
from forgekit.state import TrainState
from forgekit.steps.experts import StepRouters
from forgekit.steps.forward import (
    LossFn,
    check_loss,
    check_output,
    compute_loss,
    length_of,
    take_part,
)
from forgekit.steps.losses import Loss, values_of
from forgekit.steps.position_proof import (
    SUMS_CLOSE,
    find_unequal,
    halves_of,
    take_positions,
)
from forgekit.steps.ranges import named
from forgekit.steps.recorded_call import Call, note_call, once
from forgekit.steps.totals import LossSums


def accumulate_staged(
    routers: StepRouters,
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    sync: Sync,  # noqa: ARG001 (a schedule reduces each stage's gradients once, after the last)
    sharded: FsdpModules,
    *,
    is_first: bool = False,
) -> LossSums:
    """Leave a step's summed raw gradient in the parameters of this rank's stages.

    Args:
        routers: Notes what routers of experts count.
        state: The state, its model split by ``split_stages``.
        batches: Micro-batches of one shape, the same on every rank of the pipeline; sized.
        loss_fn: ``loss_fn(model, batch) -> Loss``, which calls ``model`` once.
        sync: Without effect: gradients are reduced after the last micro-batch.
        sharded: The FSDP modules of all stages.
        is_first: Whether it is a run's first step, which checks where positions come from.

    Returns:
        The losses on the rank of the last stage, zeros on the others; all count rows.

    Raises:
        TypeError: If the number of micro-batches is not known, a stage returns no tensor, or
            ``loss_fn`` no ``Loss``.
        ValueError: If the schedule cannot run so many micro-batches, they differ in shape or from
            those of other ranks, ``loss_fn`` does not call the model or is no sum over positions
            under context parallelism, or the model's own ``forward`` changes what passes between
            its blocks.
        RuntimeError: If ``loss_fn`` calls the model twice.
    """
    size = length_of(batches)
    if size is None:
        raise TypeError(
            f"{type(batches).__name__} has no len(), and a pipeline has to know how many micro-"
            "batches a step has. Pass list(batches), or groups of a known length: forgekit.groups."
        )
    for module in sharded:
        sum_gradients(module)
    work = _Work(state, batches, size, loss_fn, is_first)
    shape = work.start()
    if is_first and size:
        work.check_positions()
    if size:
        with routers.noting():
            work.stages.run(size, shape, work.train)
    if is_first and state.layout.context > 1:
        raise_together(work.problem)
    return work.sums


def evaluate_staged(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    *,
    audit: bool = False,
) -> LossSums:
    """Compute the losses of any number of micro-batches, without gradients.

    The ranks walk through the stages in step, see ``forward_at``. Micro-batches may differ in
    shape, and need no length.

    Args:
        state: The state, its model split by ``split_stages`` and in evaluation mode.
        batches: Micro-batches, the same on every rank of the pipeline.
        loss_fn: ``loss_fn(model, batch) -> Loss``, which calls ``model`` once.
        audit: Whether the first micro-batch shows under context parallelism that the loss is a sum
            over positions.

    Returns:
        The losses on the rank of the last stage, zeros on the others; all count rows.

    Raises:
        ValueError: If the ranks of the pipeline come with different micro-batches, or the loss is
            no sum over positions.
    """
    work = _Work(state, batches, length_of(batches), loss_fn, audit)
    work.start()
    slot, received = 0, ()
    with work.stages.guarded():
        while not work.is_done:
            at, sent = work.stages.at(slot), None
            if at is not None and work.has(at[1]):
                sent = at[0], work.compute(*at, received)
            slot += 1
            at = work.stages.at(slot)
            due = (at[0], work.shape(at[1])) if at is not None and work.has(at[1]) else None
            received = work.stages.pass_on(sent, due)
    if audit and state.layout.context > 1:
        raise_together(work.problem)
    return work.sums


@attrs.define(eq=False)
class _Work:
    """One step or evaluation on this rank: its micro-batches, their losses, and what stages do."""

    _state: TrainState
    _source: Iterator[TensorDictBase] = attrs.field(converter=iter)
    _size: int | None
    _loss_fn: LossFn
    _is_first: bool = False
    problem: str | None = attrs.field(default=None, init=False)
    sums: LossSums = attrs.field(init=False)
    _pulled: int = attrs.field(default=0, init=False)
    _shape: torch.Size = attrs.field(default=torch.Size((0, 0)), init=False)
    _calls: dict[int, Call] = attrs.field(factory=dict, init=False)
    _computed: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.sums = LossSums(self._state.targets.device)

    @property
    def stages(self) -> Stages:
        """This rank's stages."""
        return self._state.layout.stages

    @property
    def is_done(self) -> bool:
        """Whether all micro-batches went through all stages of this rank."""
        return self._size is not None and self._computed == self._size * len(self.stages.mine)

    def start(self) -> torch.Size:
        """Pull the first micro-batch, compare it with the other ranks', and return its shape."""
        self.stages.follow()
        kind, error = "", None
        try:
            self.stages.check_unbroken()
            if self.has(0):
                self._shape = self.shape(0)
                kind = f"{self._state.model.training} {self._calls[0].kind}"
        except Exception as raised:
            error = raised
        self.stages.agree(self._size, self._shape, kind, error)
        if torch.is_grad_enabled() and self._size:
            self.stages.check_count(self._size)
        if self._pulled and not self.stages.knows(kind, self._shape):
            self._rehearse(kind)
        return self._shape

    def has(self, micro_batch: int) -> bool:
        """Say whether there is such a micro-batch, pulling up to it and no further."""
        while self._pulled <= micro_batch and self._pulled != self._size:
            batch = next(self._source, None)
            if batch is None and self._size is None:
                self._size = self._pulled
            elif batch is None:
                raise ValueError(
                    f"the micro-batches have a len() of {self._size} and ended after "
                    f"{self._pulled}; len() must count the micro-batches that are yielded."
                )
            else:
                if self._is_first and self._pulled == 0:
                    self.sums.note(batch)
                part = take_part(batch, self._state.layout, self.stages.device)
                self._calls[self._pulled] = note_call(self._state.model, part, self._loss_fn)
                self._pulled += 1
        return micro_batch < self._pulled

    def shape(self, micro_batch: int) -> torch.Size:
        """Shape of what the first stage is given."""
        return self._calls[micro_batch].first.shape

    def check_positions(self) -> None:
        """Raise if nothing tells the stages where their slices of a sequence are.

        Raises:
            ValueError: On every rank alike.
        """
        layout = self._state.layout
        if layout.context > 1 and not layout.locates and "position_ids" not in self._calls[0].batch:
            model = type(self._state.model).__name__
            raise ValueError(
                f"{model} has no locate socket and the batch no position_ids, so the ranks that "
                f"share a sequence (cp {layout.context}) would count positions inside their "
                "slices. Use self.locate(s, device) in the model, or pass position_ids."
            )

    def train(
        self, stage: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Compute as a part of a step: all shapes are the same, and the loss is scaled.

        Raises:
            ValueError: If this micro-batch has another shape than the first one.
        """
        if self.has(micro_batch) and (shape := self.shape(micro_batch)) != self._shape:
            raise ValueError(
                f"micro-batch {micro_batch} has shape {tuple(shape)} and the first one of the "
                f"step {tuple(self._shape)}; in a pipeline they must all have the same. Pad rows "
                "to one length, or pack them."
            )
        with named(f"forward of stage {stage}"):
            out = self.compute(stage, micro_batch, received)
        if self._size is not None and 0 < micro_batch == self._size - 1:
            widen_accumulators(fsdp_modules(self.stages.modules[self.stages.mine.index(stage)]))
        is_last = stage == self.stages.count - 1
        return (out[0] * self._state.loss_scale.to(out[0].dtype),) if is_last else out

    def compute(
        self, stage: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a micro-batch through a stage; of the last stage, add its loss up and return it."""
        call = self._calls[micro_batch]
        if stage == self.stages.mine[-1]:  # this rank does not need it any more
            del self._calls[micro_batch]
        self._computed += 1
        out = self.stages.forward(stage, call.run, call.first.shape, received)
        if stage < self.stages.count - 1:
            self._count_rows(stage, call)
            return out
        loss = self._loss(out, call)
        if self._is_first and micro_batch == 0 and self._state.layout.context > 1:
            self.problem = self._find_unequal(loss, out, call)
        if torch.is_grad_enabled():
            check_loss(loss)
        self.sums.add(loss, rows=call.batch.batch_size[0])
        return (loss.sum,)

    @torch.no_grad()
    def _find_unequal(self, loss: Loss, out: Any, call: Call) -> str | None:
        """Find whether the loss is no sum over positions; not of one that a ``head`` computes."""
        if isinstance(out, Loss):
            return None
        positions = self._shape[1]
        parts = []
        for half in halves_of(call.batch):
            taken = take_positions(call.batch, half, positions)
            model = once(self._state.model, take_positions(out, half, positions))
            parts.append(compute_loss(model, taken, self._loss_fn))
        return find_unequal(loss, parts, context=self._state.layout.context, close=SUMS_CLOSE)

    def _loss(self, out: Any, call: Call) -> Loss:
        """Call the loss function again, with the real output."""
        check_output(self._state.model, (), out)
        return compute_loss(once(self._state.model, out), call.batch, self._loss_fn)

    def _count_rows(self, stage: int, call: Call) -> None:
        if stage == self.stages.mine[0] and not self.stages.has_last:
            nothing = torch.zeros((), device=self.sums.device)
            self.sums.add(Loss(nothing, 0), rows=call.batch.batch_size[0])

    def _rehearse(self, kind: str) -> None:
        """Run the first micro-batch's shapes through all stages; its loss does not count."""
        call = self._calls[0]

        def loss(out: Any) -> list[Tensor]:
            found = self._loss(out, call)
            if self._state.model.training:
                check_loss(found)
            return [v for v in values_of(found) if isinstance(v, Tensor)]

        device = self.stages.device
        devices = [device] if device.type != "cpu" else []
        try:
            with torch.random.fork_rng(devices, device_type=device.type):
                self.stages.learn(kind, call.first.shape, call.run, loss)
        finally:
            for root in self.stages.modules:
                modules = fsdp_modules(root)
                reset_iteration(modules)
                release(modules)
