"""Forward and backward over a step's micro-batches, pulled one at a time.

No micro-batch's size or count divides anything here, so none has to be known before its turn: a
rollout stream is not drained early, and no collective runs per micro-batch. What comes out are raw
sums; ``reduce_totals`` adds them over the ranks and ``clip`` finds the one factor that is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from forgekit.checks import check_choice
from forgekit.mesh import data_ranks
from forgekit.parallel.fsdp import (
    FsdpModules,
    Sync,
    clear_gradients,
    find_hooked,
    find_unreduced,
    first_gradient,
    fsdp_modules,
    gather_skipped,
    release,
    reset_iteration,
    set_sync,
    widen_accumulators,
)
from forgekit.parallel.layout import size_of, world_of
from forgekit.state import TrainState
from forgekit.steps.audit.first_step import Audit, auditing
from forgekit.steps.experts import StepRouters
from forgekit.steps.micro_batch import (
    LossFn,
    check_loss,
    compute_loss,
    explaining,
    first_number_of,
    length_of,
    mixing_tensors,
    seed_micro_batch,
    take_part,
)
from forgekit.steps.pipelined import accumulate_staged
from forgekit.steps.ranges import NOTHING, named, ranged
from forgekit.steps.totals import OPEN, Held, LossSums, Totals, parameters_of, take_held

SYNCS = get_args(Sync)


@ranged
def accumulate(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    *,
    sync: Sync = "last",
    audit: bool = True,
    more: bool = False,
    onto: Totals | None = None,
) -> Totals:
    """Leave the summed raw gradient of a step in the parameters and return its sums.

    Clears old gradients, then runs one backward per pulled micro-batch. Ranks that share a
    sequence take their positions of each; pipeline stages pass micro-batches on to each other. A
    parameter that none of them used gets a gradient of zero. The default random generator is
    seeded for each micro-batch from ``(seed, step, rank, number)``, with the rank among those that
    see other data or other layers, so that dropout depends on nothing that a checkpoint would have
    to keep. Does not donate ``state``.

    Several calls add up to one: ``totals = accumulate(state, first, loss_fn, more=True)``, then
    ``accumulate(state, second, loss_fn, onto=totals)``. With ``more`` nothing is reduced over the
    ranks before the last call, and gradients and totals are to the bit those of one call with all
    micro-batches; without it they are reduced in each call, and equal up to the order of sums.

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
        audit: Whether a run's first step proves the tensor-parallel plan, that positions under
            context parallelism are those of whole sequences, that ranks run the same modules, and
            in ``reduce_totals`` that rows, settings and replicas are the same: one switch.
        more: Whether the step goes on in another call, which gets what this one returns. It can
            do so once; an exception there clears everything.
        onto: What an earlier call of this step returned, to go on from.

    Returns:
        Unreduced ``Totals``: ``targets``, ``loss``, the metrics, what routers of experts counted,
        and the samples consumed globally.

    Raises:
        TypeError: If a batch is no TensorDict, the model returns one in a run's first step, or
            ``loss_fn`` returns no ``Loss``.
        ValueError: If there is no micro-batch, the loss does not depend on the parameters, ranks
            run different modules, a sharded parameter has a gradient hook, the optimizer holds
            one that is not sharded, or the gradients of ``onto`` are not there any more. Whatever
            is raised, no gradient is left behind and the step can be tried again.
    """
    check_choice("sync", sync, SYNCS)
    layout = state.layout
    sharded = fsdp_modules(*layout.roots(state.model))
    release(sharded)
    try:
        held = _begin(state, sharded, onto)
        sums, rows_before = held.losses, held.losses.rows
        stages = [] if layout.stages is None else layout.stages.modules
        modules = state.model.modules() if stages else sharded.walked
        routers = StepRouters(
            modules, state.loss_scale, state.targets.device, stages, noted=held.noted
        )
        with (
            mixing_tensors(layout),
            auditing(state, loss_fn, sharded, audit=audit, is_begun=onto is not None) as proofs,
            explaining(),
        ):
            step = (state, batches, loss_fn, sums, routers, sharded)
            if layout.stages is None:
                _accumulate_whole(*step, proofs, sync=sync, more=more)
            else:
                accumulate_staged(*step, proofs.look, more=more)
        if sums.rows == rows_before:
            raise ValueError("a step got no micro-batch; every rank must bring at least one.")
        held.read |= proofs.read
        held.count_rows(batches, (sums.rows - rows_before) * data_ranks(state.mesh)[1])
        unreduced = () if onto is None else onto.unreduced
        if not more:
            unreduced = _end(state, sharded, (*unreduced, *held.read))
        if (gradient := first_gradient(sharded)) is not None:
            held.gradient = TensorWeakRef(gradient)
        return sums.totals(
            state.loss_scale,
            held.samples,
            noted=routers.sums(),
            rows=sums.rows if held.is_counted else 0,
            digest=proofs.digest if onto is None else onto.digest,
            unreduced=unreduced,
            problem=OPEN if more else sums.problem,
            audit=audit,
            held=held,
        )
    except BaseException:
        reset_iteration(sharded)
        clear_gradients(sharded)
        raise


def _begin(state: TrainState, sharded: FsdpModules, onto: Totals | None) -> Held:
    """Clear old gradients for a new step, or go on from those of an earlier call."""
    _check_parameters(state, sharded)
    if onto is not None:
        return take_held(onto, state, first_gradient(sharded))
    clear_gradients(sharded)
    return Held(state.step, LossSums(state.targets.device))


def _end(state: TrainState, sharded: FsdpModules, noted: tuple[str, ...]) -> tuple[str, ...]:
    """Give parameters that nothing used a gradient of zero; return those never reduced."""
    # Before zeros are filled in: what was never reduced must not pass for unused.
    if unreduced := (*find_unreduced(state.model, sharded), *sorted(noted)):
        # `reduce_totals` refuses the step, on all ranks together.
        reset_iteration(sharded)
        clear_gradients(sharded)
    _fill_unused(state)
    return unreduced


def _accumulate_whole(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    loss_fn: LossFn,
    sums: LossSums,
    routers: StepRouters,
    sharded: FsdpModules,
    proofs: Audit,
    *,
    sync: Sync,
    more: bool,
) -> None:
    """Run each micro-batch forward and backward through a model that this rank has whole."""
    device, first = state.targets.device, len(sums.losses)
    first_number = first_number_of(batches)
    for number, (batch, is_end) in enumerate(_with_last(batches), start=first):
        is_last = is_end and not more
        if number == first or is_end:
            set_sync(sharded, sync, is_last)
        is_new = number == 0 and state.agreed is None  # of a run's first step
        with proofs.looking_at(batch) if is_new else NOTHING, named("forward"), routers.noting():
            part = take_part(batch, state.layout, device)
            # After the proofs, which draw numbers too.
            seed_micro_batch(state, first_number + number)
            loss = compute_loss(state.model, part, loss_fn)
        check_loss(loss)
        if number == 0:
            gather_skipped(sharded)
        elif is_last:
            widen_accumulators(sharded)
        with named("backward"):
            loss.sum.backward(state.loss_scale.to(loss.sum.dtype))
        sums.add(loss, rows=batch.batch_size[0])
        del loss  # its metrics may hold what its graph holds


def count_ahead(
    state: TrainState,
    batches: Iterable[TensorDictBase],
    counters: Mapping[str, Callable[[TensorDictBase], Tensor | int]],
) -> tuple[list[TensorDictBase], dict[str, Tensor]]:
    """Count a step's targets before its first backward, for losses with different divisors.

    One factor per step is exact only for losses that share a count. With the true counts at hand
    the others can be rescaled: ``Loss(a.sum + b.sum * counts["a"] / counts["b"], a.count)``. The
    price is that all micro-batches are pulled at once, and one more collective.

    Args:
        state: The state; nothing in it changes.
        batches: The step's micro-batches; pulled eagerly.
        counters: For each name a function that counts a micro-batch's targets of that kind.

    Returns:
        The micro-batches as a list for ``accumulate``, and each name's ``[]`` float64 count over
        all micro-batches and data-parallel ranks; those that share a micro-batch count it once.
    """
    pulled = _Pulled(batches)
    pulled.samples = getattr(batches, "samples", None)
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


class _Pulled(list[TensorDictBase]):
    """Micro-batches that were pulled ahead; keeps what their group counted."""

    samples: int | None = None


def _with_last(batches: Iterable[TensorDictBase]) -> Iterator[tuple[TensorDictBase, bool]]:
    """Each micro-batch with whether it is the last; pulls ahead only where the size is unknown."""
    size = length_of(batches)
    if size is not None:
        count = 0
        for count, batch in enumerate(batches, start=1):
            yield batch, count == size
        if count != size:  # gradients would not be reduced
            raise ValueError(
                f"{type(batches).__name__} has a len() of {size} and yielded {count}; len() must "
                "count the micro-batches that it yields."
            )
        return
    iterator = iter(batches)
    for batch in iterator:
        previous = batch
        for following in iterator:
            yield previous, False
            previous = following
        yield previous, True


def _check_parameters(state: TrainState, sharded: FsdpModules) -> None:
    """Raise if a gradient hook would never be called, or a gradient never be reduced."""
    if world_of(state.mesh) == 1 and not sharded:
        return
    if names := find_hooked(state.model, sharded):
        raise ValueError(
            f"{names[0]!r} has a gradient hook, which FSDP never calls: it sets gradients of "
            "shards by itself. Remove the hook, and change parameter.grad between accumulate and "
            "reduce_totals."
        )
    held = parameters_of(state.optimizer)
    plain = [tuple(p.shape) for p in held if not isinstance(p, DTensor)]
    if plain and world_of(state.mesh) > 1:
        raise ValueError(
            f"the optimizer holds {len(plain)} parameters (first: {plain[0]}) that are not "
            "sharded, so their gradients would not be reduced. Add them to the model before "
            "forgekit.parallelize(model, mesh)."
        )


def _fill_unused(state: TrainState) -> None:
    """Give parameters that no micro-batch used a gradient of zero, in every layout alike.

    FSDP does so for some and not for others, by what ran before; an optimizer treats a missing
    gradient differently from zero, so layouts and resumed runs would drift apart.
    """
    for parameter in parameters_of(state.optimizer):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
