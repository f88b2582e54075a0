"""Forward and backward over a step's micro-batches, pulled one at a time.

Nothing here is divided by a micro-batch's size or count, so neither has to be known before its
turn: a rollout stream is not drained early, and ranks may have different numbers of targets. What
comes out are raw sums: gradients of summed losses times the loss scale, which keeps 16-bit
gradients in range, and ``Totals``. ``reduce_totals`` adds the totals over the ranks and takes the
gradient's norm; ``clip`` computes the one factor that divides, clips and takes the loss scale out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.mesh import data_ranks
from forgekit.parallel.fsdp import Sync
from forgekit.parallel.fsdp_step import FsdpStep
from forgekit.parallel.layout import size_of, world_of
from forgekit.ranges import named, ranged
from forgekit.state import TrainState
from forgekit.steps.experts import StepRouters
from forgekit.steps.micro_batch import (
    Listed,
    LossFn,
    check_loss,
    check_output,
    compute_loss,
    explaining,
    length_of,
    mixing_tensors,
    samples_of,
    seed_micro_batch,
    share_of,
    take_part,
)
from forgekit.steps.pipelined import accumulate_staged
from forgekit.steps.totals import LossSums, Totals, parameters_of


@ranged
def accumulate(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    *,
    sync: Sync = "last",
) -> Totals:
    """Leave the summed raw gradient of a step in the parameters and return its sums.

    Clears old gradients, then runs one backward per pulled micro-batch. It is the short form of
    ``begin_step`` and one ``add``. Does not donate ``state``.

    Args:
        state: The state; its step, optimizer and parameter values do not change.
        batches: Micro-batches, whole sequences, the same number on every rank. One is pulled when
            the previous one is done; an iterable without ``len`` is looked ahead by one (and
            refused by a pipeline, whose schedule has to know how many there are).
        loss_fn: ``loss_fn(model, batch) -> Loss``.
        sync: When sharded gradients are reduced: after the ``"last"`` micro-batch, after
            ``"every"`` one (less memory, more communication), or ``"hsdp_last"``: scattered after
            every one, summed across replicas after the last. All give the same gradient. A
            pipeline always waits for the last.

    Returns:
        Unreduced ``Totals``: ``targets``, ``loss``, the metrics, what routers of experts counted,
        and the samples consumed globally.

    Raises:
        TypeError: If a batch is not a TensorDict, the model returns one in the first step of a
            process, or ``loss_fn`` does not return a ``Loss``.
        ValueError: If there is no micro-batch, the loss does not depend on the parameters, a
            sharded parameter has a gradient hook, or the optimizer holds one that is not sharded.
            Whatever is raised, no gradient is left behind and the step can be tried again.
    """
    with begin_step(state, sync=sync) as step:
        step.add(batches, loss_fn, last=True)
    return step.totals


def begin_step(state: TrainState, *, sync: Sync = "last") -> StepInProgress:
    """Begin a step: clear old gradients, including those of a step that was never ended.

    The step is a handle that the caller holds; one is in progress at a time. Leaving the ``with``
    block reduces the gradients and sets ``totals``; an exception in the block clears what was
    accumulated. Without a block, as in a server whose requests come one at a time, ``end`` does
    what leaving the block does, and ``abandon`` what an exception does. Call ``audit`` yourself
    before the first step, once for each loss function.

    Args:
        state: The state; its step, optimizer and parameter values do not change.
        sync: See ``accumulate``.

    Returns:
        The step, without a micro-batch.

    Raises:
        ValueError: If a sharded parameter has a gradient hook, or the optimizer holds a parameter
            that is not sharded.

    Examples:
        >>> from tensordict import TensorDict
        >>> from forgekit import Loss
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> batch = TensorDict({"x": torch.tensor([[2.0], [4.0]])}, [2])
        >>> loss_fn = lambda model, batch: Loss(model(batch["x"]).sum(), 2)
        >>> with begin_step(state) as step:
        ...     step.add([batch], loss_fn)
        ...     step.add([batch, batch], loss_fn, last=True)
        >>> step.totals["targets"]
        tensor(6., dtype=torch.float64)

        A server has no block around its requests::

            step = fk.begin_step(state)  # before the first "forward_backward"
            step.add(batches, loss_fn)  # each "forward_backward"
            totals = fk.reduce_totals(step.end(), state)  # "optim_step": then clip and update
    """
    return StepInProgress(state, sync)


class StepInProgress:
    """A step between ``begin_step`` and its end: its sums, and the number of micro-batches."""

    def __init__(self, state: TrainState, sync: Sync) -> None:
        layout = state.layout
        self._state = state
        self._sync = sync
        self._sharded = FsdpStep(layout.roots(state.model), sync)
        self._owner = state.gradient_owner
        self._owner.step = self  # an earlier step is refused from now on
        self._sharded.begin()  # clears all gradients
        _check_parameters(state, self._sharded)
        stages = [] if layout.stages is None else layout.stages.modules
        modules = state.model.modules() if stages else self._sharded.all_modules
        device = state.targets.device
        self._routers = StepRouters(modules, state.loss_scale, device, stages)
        self._sums = LossSums(device)
        self._samples = 0
        self._rows_are_samples = True
        self._shares: tuple[tuple[Any, Any], ...] = ()
        self._done_by_others = 0  # micro-batches so far of other replica groups
        self._is_closed = self._is_reduced = False  # closed: `add` was called with last=True
        self._phase: Literal["in progress", "over", "abandoned"] = "in progress"
        self._totals: Totals | None = None

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches so far, on this rank."""
        return len(self._sums.losses)

    @property
    def totals(self) -> Totals:
        """The step's sums, once it has ended.

        Raises:
            ValueError: If it has not ended.
        """
        if self._totals is None:
            raise self._refusal("totals are available only after it ends")
        return self._totals

    def add(
        self, batches: Iterable[TensorDictBase], loss_fn: LossFn, *, last: bool = False
    ) -> None:
        """Run one backward per pulled micro-batch, and add its gradient and sums to the step's.

        Ranks that share a sequence take their positions of each micro-batch; pipeline stages pass
        them on to each other. The default random generator is seeded for each micro-batch from
        ``(seed, step, data rank, context rank, pipeline stage, number in the step)``, so dropout
        depends on nothing that a checkpoint would have to keep.

        Args:
            batches: See ``accumulate``; may be empty.
            loss_fn: ``loss_fn(model, batch) -> Loss``; may differ between calls. All sums have one
                divisor, the step's number of targets.
            last: Whether this is the step's last call: gradients are then reduced during its last
                backward, overlapping computation. If False, the end of the step reduces them.

        Raises:
            ValueError: If the step is not in progress, or an earlier call had ``last=True``; see
                ``accumulate``. An exception from a micro-batch abandons the step.
        """
        self._check_in_progress()
        if self._is_closed:
            raise ValueError("the previous add() had last=True; pass it to the final add() only.")
        self._is_closed = last
        layout, rows_before, done_before = self._state.layout, self._sums.rows, self.micro_batches
        share = share_of(batches)
        seed_offset = self._done_by_others + (0 if share is None else share.first_number)
        try:
            # Plain tensors may meet tensor-parallel ones; some torch errors become ValueErrors.
            with mixing_tensors(layout), explaining():
                if layout.stages is None:
                    self._add_whole(batches, loss_fn, last, seed_offset)
                else:
                    args = (self._state, batches, loss_fn, self._sums, self._routers)
                    has_run = accumulate_staged(*args, is_last=last, seed_offset=seed_offset)
                    self._is_reduced = has_run and last
        except BaseException:
            self.abandon()
            raise
        samples = samples_of(batches)
        if samples is None:  # every data-parallel rank has the same number of rows
            samples = (self._sums.rows - rows_before) * data_ranks(self._state.mesh)[1]
        else:
            self._rows_are_samples = False
        self._samples += samples
        if share is not None:
            micro_batches_of_all, _ = share.whole
            self._shares += ((samples, share.whole),)
            self._done_by_others += micro_batches_of_all - (self.micro_batches - done_before)

    def _add_whole(
        self, batches: Iterable[TensorDictBase], loss_fn: LossFn, last: bool, seed_offset: int
    ) -> None:
        """Run each micro-batch forward and backward through a model that this rank has whole."""
        state, sharded, device = self._state, self._sharded, self._state.targets.device
        for number, (batch, ends_call) in enumerate(_with_last(batches), start=self.micro_batches):
            is_last = ends_call and last  # the last micro-batch of the step
            sharded.before_forward(is_last)  # FSDP asks in forward whether backward reduces
            with named("forward"), self._around_forward(number):
                part = take_part(batch, state.layout, device)
                seed_micro_batch(state, seed_offset + number)
                loss = check_loss(compute_loss(state.model, part, loss_fn))
            sharded.before_backward(number, is_last)  # makes up for blocks that were not used
            with named("backward"):  # starts from the loss scale, not from 1
                loss.sum.backward(state.loss_scale.to(loss.sum.dtype))
            self._sums.add(loss, rows=batch.batch_size[0])
            self._is_reduced = is_last or self._sync == "every"
            del loss  # its metrics may hold what its graph holds

    def end(self) -> Totals:
        """Reduce what no backward has reduced and return the sums, as leaving the block does.

        A parameter that no micro-batch used gets a gradient of zero, in every layout.

        Raises:
            ValueError: If the step is not in progress, or has no micro-batch.
        """
        self._check_in_progress()
        try:
            self._totals = self._end()
        except BaseException:
            self.abandon()
            raise
        self._phase = "over"
        return self._totals

    def _end(self) -> Totals:
        if not self.micro_batches:
            raise ValueError("a step got no micro-batch; every rank must provide at least one.")
        state, sums = self._state, self._sums
        # Gradients that FSDP still holds back are cleared here, so `.grad` is None for them as for
        # unused parameters. Only these names tell the two apart; `reduce_totals` raises for them.
        unreduced = self._sharded.end(state.model, is_reduced=self._is_reduced)
        _fill_unused(state)
        return sums.totals(
            state.loss_scale,
            self._samples,
            self._routers.sums(),
            rows=sums.rows if self._rows_are_samples else 0,
            unreduced=tuple(unreduced),
            shares=self._shares,
        )

    def abandon(self) -> None:
        """Clear what was accumulated, in place, and what FSDP holds back.

        An exception in the block or in ``add`` does the same. A step that has ended, or was
        replaced by a newer one, is left as it is, so an ``except`` may always call this.
        """
        if self._phase == "in progress" and self._owner.step is self:
            self._phase = "abandoned"
            self._sharded.begin()

    def __enter__(self) -> Self:
        """Return the step, which has begun already."""
        self._check_in_progress()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """End the step, or abandon it after an exception."""
        if kind is not None:
            self.abandon()
        elif self._phase == "in progress":
            self.end()

    def _check_in_progress(self) -> None:
        if self._phase != "in progress" or self._owner.step is not self:
            raise self._refusal("begin a new step with forgekit.begin_step(state)")

    def _refusal(self, remedy: str) -> ValueError:
        is_replaced = self._phase == "in progress" and self._owner.step is not self
        phase = "replaced by a newer step" if is_replaced else self._phase
        return ValueError(f"this step is {phase}; {remedy}.")

    def _around_forward(self, number: int) -> AbstractContextManager[object]:
        """Record what routers count; in a process's first forward, check what modules return."""
        recording = self._routers.recording()
        if number or self._state.agreed_names is not None:  # set by the first reduction
            return recording
        hooks = ExitStack()
        hooks.enter_context(recording)
        for module in (self._state.model, *self._sharded.modules):
            hooks.enter_context(module.register_forward_hook(check_output))
        return hooks


def count_ahead(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    counters: Mapping[str, Callable[[TensorDictBase], Tensor | int]],
) -> tuple[list[TensorDictBase], dict[str, Tensor]]:
    """Count a step's targets before its first backward, for losses with different divisors.

    One factor per step is exact only for losses that share a count. With the true counts the others
    can be rescaled: ``Loss(a.sum + b.sum * counts["a"] / counts["b"], a.count)``. The cost is that
    all micro-batches are pulled at once, and one more collective.

    Args:
        state: The state; nothing in it changes.
        batches: The step's micro-batches; pulled eagerly.
        counters: For each name a function that counts a micro-batch's targets of that kind.

    Returns:
        The micro-batches as a list for ``accumulate``, and each name's ``[]`` float64 count over
        all micro-batches and data-parallel ranks; those that share a micro-batch count it once.
    """
    pulled = Listed(batches)
    pulled.source = batches
    device = state.targets.device
    counts = torch.zeros(len(counters), dtype=torch.float64, device=device)
    for batch in pulled:
        for index, counter in enumerate(counters.values()):
            counts[index] += counter(batch)
    if state.mesh is not None and world_of(state.mesh) > 1:
        shared = [name for name in ("pp", "cp", "tp") if size_of(state.mesh, name) > 1]
        if any(map(state.mesh.get_local_rank, shared)):  # the first of them counts for all
            counts.zero_()
        dist.all_reduce(counts)
    return pulled, dict(zip(counters, counts.unbind(), strict=True))


def _with_last(batches: Iterable[TensorDictBase]) -> Iterator[tuple[TensorDictBase, bool]]:
    """Yield each micro-batch and whether it is the last one; pull ahead if the size is unknown."""
    if (size := length_of(batches)) is not None:
        for count, batch in enumerate(batches, start=1):
            yield batch, count == size
        return
    pulled: list[TensorDictBase] = []
    for batch in batches:
        if pulled:
            yield pulled.pop(), False
        pulled.append(batch)
    if pulled:
        yield pulled.pop(), True


def _check_parameters(state: TrainState, sharded: FsdpStep) -> None:
    """Raise if a gradient hook would never be called, or a gradient never be reduced."""
    if world_of(state.mesh) == 1 and not sharded.modules:
        return
    if names := sharded.hooked(state.model):
        raise ValueError(
            f"{names[0]!r} has a gradient hook, which FSDP never calls. Change parameter.grad "
            "after accumulate and before reduce_totals instead."
        )
    held = parameters_of(state.optimizer)
    plain = [tuple(p.shape) for p in held if not isinstance(p, DTensor)]
    if plain and world_of(state.mesh) > 1:
        raise ValueError(
            f"the optimizer holds {len(plain)} parameters (first: {plain[0]}) that are not "
            "sharded: their gradients would not be reduced. Add them before parallelize."
        )


def _fill_unused(state: TrainState) -> None:
    """Give parameters that no micro-batch used a gradient of zero, in every layout.

    FSDP does so for some of them, depending on what ran before; an optimizer treats a missing
    gradient differently from zero, so layouts and resumed runs would drift apart.
    """
    for parameter in parameters_of(state.optimizer):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
