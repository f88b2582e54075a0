"""One step, or one evaluation, through the stages of a pipeline, with the same loss function.

Each stage calls ``loss_fn(model, batch)`` with a ``model`` that runs the stage where the loss
function calls it. Before the last stage the loss function ends there; on the last one it gets the
model's output and goes on. So what stands before the call runs on every stage. A micro-batch is
pulled when this rank's first stage is about to work on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from forgekit.parallel.fsdp import fsdp_modules, release, reset_iteration
from forgekit.parallel.fsdp_step import FsdpStep
from forgekit.parallel.pipeline.rehearsal import PARAMETER_READ, NoReads
from forgekit.parallel.pipeline.stages import Stages
from forgekit.ranges import named
from forgekit.state import TrainState
from forgekit.steps.experts import StepRouters
from forgekit.steps.losses import Loss, values_of
from forgekit.steps.micro_batch import (
    LossFn,
    check_loss,
    check_output,
    compute_loss,
    explaining,
    length_of,
    seed_micro_batch,
    take_part,
)
from forgekit.steps.totals import LossSums
from forgekit.tensors import full

PARAMETERS = frozenset({"parameters", "named_parameters", "state_dict", "modules", "named_modules"})
"""What gives a model's parameters."""

FirstLook = Callable[[TensorDictBase], None] | None


def accumulate_staged(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    sums: LossSums,
    routers: StepRouters,
    *,
    is_last: bool,
    seed_offset: int,
) -> bool:
    """Leave a step's summed raw gradient in the parameters of this rank's stages.

    A schedule reduces each stage's gradients once, after the last micro-batch.

    Args:
        state: The state, its model split into ``Stages``.
        batches: Micro-batches of one shape, the same on every rank of the pipeline; sized.
        loss_fn: ``loss_fn(model, batch) -> Loss``, which calls ``model`` once.
        sums: Gets the losses on the rank of the last stage, zeros on the others; all count rows.
        routers: Records what routers of experts count.
        is_last: Whether these are the step's last micro-batches; before them nothing is reduced.
        seed_offset: Added to each one's number in the step, for its seed.

    Returns:
        Whether there was a micro-batch.

    Raises:
        TypeError: If ``batches`` has no ``len``, a stage does not return a tensor, or ``loss_fn``
            does not return a ``Loss``.
        ValueError: If the schedule cannot run so many micro-batches, they differ in shape or from
            those of other ranks, ``loss_fn`` does not call the model, or more than the stream has
            to cross between stages.
        RuntimeError: If ``loss_fn`` calls the model twice, another rank raised before the first
            stage began, or an exception has broken off an earlier schedule.
    """
    size = len(batches)  # pyright: ignore[reportArgumentType]  # a schedule has to know it
    work = _Work(state, batches, size, loss_fn, None, sums, is_last, seed_offset)
    shape = work.start()
    if size:
        with routers.recording():
            work.stages.run(size, shape, work.train, reduces=is_last)
    return size > 0


def evaluate_staged(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    *,
    first: FirstLook = None,
) -> LossSums:
    """Compute the losses of any number of micro-batches of any shapes, without gradients.

    As many as there are stages go through the pipeline together, after the ranks have compared
    their shapes.

    Args:
        state: The state, its model split into ``Stages`` and in evaluation mode.
        batches: Micro-batches, the same on every rank of the pipeline.
        loss_fn: ``loss_fn(model, batch) -> Loss``, which calls ``model`` once.
        first: Called with the first micro-batch, whole sequences, before anything is computed.

    Returns:
        The losses on the rank of the last stage, zeros on the others; all count rows.

    Raises:
        ValueError: If the ranks of the pipeline come with different micro-batches.
    """
    sums = LossSums(state.targets.device)
    work = _Work(state, batches, length_of(batches), loss_fn, first, sums)
    work.start()
    start, stages, shapes = 0, work.stages, None
    while shapes is None or len(shapes) == stages.count:
        with stages.guarded():
            numbers = [n for n in range(start, start + stages.count) if work.has(n)]
            shapes = {number: work.shape(number) for number in numbers}
        shown = f"{[tuple(shape) for shape in shapes.values()]} from {start} on"
        stages.agree(shown, is_alone=True)
        with stages.guarded():
            stages.evaluate(shapes, work.compute)
        start += stages.count
    return work.sums


@attrs.define(eq=False)
class _Work:
    """One step or evaluation on this rank: its micro-batches, their losses, and what stages do."""

    _state: TrainState
    _source: Iterator[TensorDictBase] = attrs.field(converter=iter)
    _size: int | None
    _loss_fn: LossFn
    _look: FirstLook
    sums: LossSums
    _is_last: bool = False
    _seed_offset: int = 0
    _trains: bool = attrs.field(factory=torch.is_grad_enabled, init=False)
    _done: int = attrs.field(init=False)
    _pulled: int = attrs.field(default=0, init=False)
    _batches: dict[int, TensorDictBase] = attrs.field(factory=dict, init=False)
    _whole: Any = attrs.field(default=None, init=False)
    _first: Any = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._done = len(self.sums.losses)

    @property
    def stages(self) -> Stages:
        """This rank's stages."""
        return self._state.layout.stages

    def start(self) -> torch.Size:
        """Compare the first micro-batch with other ranks', rehearse it, and return its shape."""
        self.stages.follow()
        shape, kind, error = torch.Size((0, 0)), "", None
        try:
            if self.has(0):
                shape, self._first = self.shape(0), self._batches[0]
                kind = f"{self._kind()} in {'training' if self._state.model.training else 'eval'}"
            if self._trains and self._size:
                self.stages.check_count(self._size)
        except Exception as raised:
            error = raised
        number = "an unknown number" if self._size is None else self._size
        shown = f"{number} of shape {tuple(shape)}, called with {kind or 'nothing'}"
        is_new = error is None and self._pulled > 0 and not self.stages.knows(kind, shape)
        rehearses = self.stages.agree(shown, error, is_new=is_new)
        if self._pulled and self._look is not None:
            self._look(self._whole)
            self.stages.follow()
        self._whole = None
        if rehearses:  # on some rank: FSDP gathers on all of them
            try:
                self._rehearse(kind, shape)
            except Exception as raised:
                error = raised
            self.stages.agree("", error)
        return shape

    def has(self, micro_batch: int) -> bool:
        """Say whether there is such a micro-batch, pulling up to it and no further."""
        while self._pulled <= micro_batch and self._pulled != self._size:
            batch = next(self._source, None)
            if batch is None and self._size is None:
                self._size = self._pulled
            elif batch is None:
                size, pulled = self._size, self._pulled
                raise ValueError(f"batches has len() {size} but yielded only {pulled}.")
            else:
                self._whole = batch if self._pulled == 0 else None
                part = take_part(batch, self._state.layout, self.stages.device)
                self._batches[self._pulled] = part
                self._pulled += 1
        return micro_batch < self._pulled

    def shape(self, micro_batch: int) -> torch.Size:
        """``[b s]``."""
        return _shape_of(self._batches[micro_batch])

    def train(self, stage: int, micro_batch: int, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Compute as a part of a step: all shapes are the same, and the loss is scaled."""
        self.has(micro_batch)
        shape, expected = self.shape(micro_batch), _shape_of(self._first)
        if shape != expected:
            raise ValueError(
                f"micro-batch {micro_batch} has shape {tuple(shape)}, the first one of the step "
                f"{tuple(expected)}; a pipeline needs one shape. Pad rows to one length, or pack."
            )
        number = self._done + micro_batch
        # Schedules mix stages and micro-batches; what is drawn must not depend on their order.
        seed_micro_batch(self._state, self._seed_offset + number, stage)
        with named(f"forward of stage {stage}"):
            out = self.compute(stage, micro_batch, received)
        # Before the last backward, which reduces what all of them have added up.
        if micro_batch + 1 == self._size and number and self._is_last:
            module = self.stages.modules[self.stages.mine.index(stage)]
            FsdpStep([module]).before_backward(number, is_last=True)
        is_last = stage == self.stages.count - 1
        return (out[0] * self._state.loss_scale.to(out[0].dtype),) if is_last else out

    def compute(
        self, stage: int, micro_batch: int, received: tuple[Tensor, ...]
    ) -> Sequence[Tensor]:
        """Run a micro-batch through a stage; of the last stage, add its loss up and return it."""
        batch, shape = self._batches[micro_batch], self.shape(micro_batch)
        if stage == self.stages.mine[-1]:  # this rank does not need it any more
            del self._batches[micro_batch]

        result = self._pass(stage, batch, shape, received)
        if not isinstance(result, Loss):
            if stage == self.stages.mine[0] and not self.stages.has_last:
                nothing = torch.zeros((), device=self.sums.device)
                self.sums.add(Loss(nothing, 0), rows=batch.batch_size[0])
            return result
        self.sums.add(result, rows=batch.batch_size[0])
        return (result.sum,)

    def _pass(
        self,
        stage: int,
        batch: TensorDictBase,
        shape: torch.Size,
        *given: Any,
        rehearses: bool = False,
    ) -> Any:
        """Return what a stage sends of a micro-batch; the last stage returns the loss."""
        is_last = stage == self.stages.count - 1
        with ExitStack() as stack:

            def output(args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
                out = self.stages.forward(stage, lambda m: m(*args, **keywords), shape, *given)
                if rehearses:
                    module = self.stages.modules[self.stages.mine.index(stage)]
                    stack.enter_context(NoReads(module.parameters()))
                if not is_last:
                    raise _StopAtStage(out)
                check_output(self._state.model, (), out)
                return out

            try:
                with explaining():  # here, since the other ranks receive the message
                    loss = compute_loss(_Bound(self._state.model, output), batch, self._loss_fn)
            except _StopAtStage as left:
                return left.with_traceback(None).out  # whose frames hold all that ran
        if not is_last:
            raise ValueError(UNCALLED)
        return check_loss(loss) if self._trains else loss

    def _kind(self) -> str:
        """How the loss function calls the model: what decides which way a forward takes."""

        def leave(args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            raise _StopAtStage(_kind_of(args, keywords, self.stages.device))

        try:
            compute_loss(_Bound(self._state.model, leave), self._first, self._loss_fn)
        except _StopAtStage as left:
            return left.with_traceback(None).out
        raise ValueError(UNCALLED)

    def _rehearse(self, kind: str, shape: torch.Size) -> None:
        """Run the first micro-batch through all stages; its loss does not count."""
        device = self.stages.device

        def compute(stage: int, *given: Any) -> Sequence[Tensor]:
            result = self._pass(stage, self._first, shape, *given, rehearses=True)
            values = values_of(result) if isinstance(result, Loss) else result
            return [full(value.detach()) for value in values if isinstance(value, Tensor)]

        try:
            with (
                torch.enable_grad(),  # in an evaluation too: what blocks keep is known by its graph
                torch.random.fork_rng(
                    [device] if device.type != "cpu" else [], device_type=device.type
                ),
            ):
                self.stages.rehearse(kind, shape, compute)
        except Exception:
            for module in fsdp_modules(*self.stages.modules):
                module.unshard()  # as the other pipelines do, in their forward
            raise
        finally:
            # No backward comes that would do it; the step begins as if nothing had run.
            for root in self.stages.modules:
                modules = fsdp_modules(root)
                reset_iteration(modules)
                release(modules)


UNCALLED = (
    "loss_fn returned without calling its model; in a pipeline it must call it once for each "
    "micro-batch, with or without targets."
)


def _shape_of(batch: TensorDictBase) -> torch.Size:
    """``[b s]``: the first two dimensions of the ids, or of the first tensor that has them."""
    tensors = [batch[key] for key in ("input_ids", *batch.keys()) if key in batch]
    shapes = (t.shape[:2] for t in tensors if isinstance(t, Tensor) and t.ndim > 1)
    return next(shapes, torch.Size((*batch.batch_size, 1)))


def _kind_of(args: tuple[Any, ...], keywords: dict[str, Any], device: torch.device) -> str:
    """Describe a call of the model by its arguments and their types, which may change its path."""
    given = {**dict(enumerate(args)), **keywords}
    shown = sorted(
        f"{name} {value.dtype} of {value.ndim}"
        if isinstance(value, Tensor)
        else f"{name} {type(value).__name__}"
        for name, value in given.items()
    )
    kinds = {"cpu", device.type}
    shown += [
        f"autocast to {torch.get_autocast_dtype(kind)}"
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    ]
    return ", ".join(shown) or "nothing"


class _StopAtStage(BaseException):
    """Leaves a loss function at its call of the model; no ``except Exception`` holds it up."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out


class _Bound:
    """The model as a loss function sees it: a call runs one stage, once."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._model, self._run, self._was_called = model, run, False

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if self._was_called:
            raise RuntimeError(
                "loss_fn called its model twice; in a pipeline the stages run once for each "
                "micro-batch. Compute the loss from one call, or use a mesh with pp=1."
            )
        self._was_called = True
        return self._run(args, keywords)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        if name in PARAMETERS or isinstance(value, nn.Module | nn.Parameter):
            raise ValueError(f"{type(self._model).__name__}.{name}: {PARAMETER_READ}")
        return value
