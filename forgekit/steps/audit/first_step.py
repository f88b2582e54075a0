"""What a run proves before its first step: that the ranks together train what one would.

The first micro-batch is computed once beside the step, forward and backward, and left as it was:
its gradients are cleared, and random numbers and buffers are put back. What every step checks
(gradients that were never reduced, changed names, uneven rows) is not here: no switch turns it off.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NamedTuple

import attrs
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from forgekit.data.batch import TEACHER
from forgekit.mesh import DATA_DIMENSIONS, data_ranks
from forgekit.parallel.agreement import exchange
from forgekit.parallel.fsdp import fsdp_modules
from forgekit.parallel.fsdp_step import FsdpStep, clear_gradients
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.steps.accumulate import begin_step
from forgekit.steps.audit.agreement import (
    ModulesError,
    RankGroup,
    Report,
    compare,
    compare_modules,
    coordinate_of,
    digest_rows,
    replicas_of,
)
from forgekit.steps.audit.copies import keeping_buffers
from forgekit.steps.audit.plan import check_plan
from forgekit.steps.audit.positions import check_positions
from forgekit.steps.audit.unread import find_unread, note_reads
from forgekit.steps.losses import Loss
from forgekit.steps.micro_batch import LossFn, Peeked, check_rows


class Finding(NamedTuple):
    """One thing that ranks compared.

    Attributes:
        compared: What was compared.
        ranks: Over which ranks, by dimensions of the mesh; ``"world"`` for all.
        found: What was found.
    """

    compared: str
    ranks: str
    found: str


@attrs.frozen
class AuditReport:
    """What the ranks compared before a run's first step; nothing differed, or it had raised.

    Attributes:
        findings: In the order in which they were compared; none in one process.
    """

    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        """One line for each finding."""
        return "\n".join(f"{one.compared} ({one.ranks}): {one.found}" for one in self.findings)


def audit(state: TrainState, batch: TensorDictBase, loss_fn: LossFn) -> AuditReport:
    """Prove, with one micro-batch, that the ranks together train what one rank would.

    ``make_step`` calls it once, before the first step of a process; a loop that is written out
    calls it itself, on every rank. The micro-batch is trained afterwards as if nothing had looked
    at it: no random number is used up, and buffers are put back. The price is one micro-batch
    (in a pipeline one for each stage) and a few small collectives.

    Compared are the rows of ranks that share them, the step and the seed; under context parallelism
    whether positions are those of whole sequences; the tensor-parallel plan; the modules that ranks
    run; whether every gradient is reduced over the ranks; and copies of parameters, gradients and
    buffers. If the micro-batch has a teacher's rows, whether the loss reads them.

    Args:
        state: The state; gradients are cleared, nothing else in it changes.
        batch: The first micro-batch of the step to come, whole sequences.
        loss_fn: ``loss_fn(model, batch) -> Loss``; called once more, and in evaluation twice more
            under tensor and under context parallelism each.

    Returns:
        What was compared. In one process nothing is, and only a teacher's rows are checked.

    Raises:
        TypeError: If the micro-batch is no TensorDict with rows.
        UnreducedError: On every rank, if gradients were never reduced, or the loss reads shards.
        ValueError: On every rank, if ranks differ, or would train another model than one rank, or
            nothing reads a teacher's rows.
    """
    world, layout = world_of(state.mesh), state.layout
    if world == 1:
        if any(key in batch for key in TEACHER):
            with _leaving_no_trace(state):
                list(_rehearse(state, batch, loss_fn, {}))
        return AuditReport()
    check_rows(batch)
    at = coordinate_of(state)
    data = tuple(at.get(name, 0) for name in DATA_DIMENSIONS)
    numbers = {name: repr(getattr(state, name)) for name in ("step", "samples", "seed")}
    rows = {("rows", "", data): digest_rows(batch)}
    findings = [Finding("rows, step and seed", "world", f"{data_ranks(state.mesh)[1]} data ranks")]
    with _leaving_no_trace(state):
        compare(exchange(Report(rows, at, settings=numbers), world))
        compared = _modules_to_compare(state)
        with _comparing(state, compared):
            if layout.context > 1:
                check_positions(state, batch, loss_fn)
                findings.append(Finding("positions", "cp", "those of whole sequences"))
            if layout.tensor > 1:
                check_plan(state, batch, loss_fn)
                found = f"{len(layout.styles)} modules"
                findings.append(Finding("tensor-parallel plan", "tp", found))
        findings += _rehearse(state, batch, loss_fn, compared)
    return AuditReport(tuple(findings))


def audited(
    state: TrainState, batches: Iterable[TensorDictBase], loss_fn: LossFn
) -> Iterable[TensorDictBase]:
    """Return a step's micro-batches, the first one audited before the first step of a process.

    For loops that are written out over a stream: the first micro-batch is pulled now and comes
    again, so that nothing is drawn twice. ``make_step`` calls it too.

    Args:
        state: As for ``audit``.
        batches: The step's micro-batches, as for ``accumulate``.
        loss_fn: As for ``audit``, which says what is raised.
    """
    if state.agreed_names is not None:
        return batches
    peeked = Peeked(batches)
    for batch in peeked.first:
        audit(state, batch, loss_fn)
    return peeked


@contextmanager
def _leaving_no_trace(state: TrainState) -> Iterator[None]:
    """Forget gradients before and after the block, and put random numbers and buffers back."""
    device, roots = state.targets.device, state.layout.roots(state.model)
    state.gradient_owner.step = None  # a step in progress loses its gradients here
    # A model that drops layers, or a loss function, may draw from these two.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type),
        keeping_buffers(roots),
    ):
        clear_gradients(*roots)
        try:
            yield
        finally:
            clear_gradients(*roots)
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _rehearse(
    state: TrainState, batch: TensorDictBase, loss_fn: LossFn, compared: Mapping[str, RankGroup]
) -> Iterator[Finding]:
    """Run a micro-batch forward and backward; compare the modules that run and the gradients."""
    layout, world, read = state.layout, world_of(state.mesh), set()
    is_read: dict[str, bool] = {}
    loss_fn = partial(note_reads, loss_fn, is_read)
    if compared:
        loss_fn = partial(_compare_forward, state, compared, loss_fn)
    with begin_step(state) as step, ExitStack() as stack:
        # Beside other rows, or positions, this rank's part of a gradient is not all of it.
        if data_ranks(state.mesh)[1] * layout.context > 1:
            sharded = FsdpStep(layout.roots(state.model))
            read = stack.enter_context(sharded.watching_shards(state.model))
        # A schedule needs several micro-batches.
        count = 1 if layout.stages is None else layout.stages.count
        step.add([batch] * count, loss_fn, last=True)
    stated = replicas_of(state, gradients=True)
    unreduced = (*step.totals.checked.unreduced, *sorted(read))
    # Only a pipeline's last stage computes the whole loss.
    unread = find_unread(is_read) if layout.has_last else None
    checked = {"unreduced": unreduced, "problem": unread}
    compare(exchange(Report(stated, coordinate_of(state), **checked), world))
    if compared:
        yield Finding("modules", "world", f"{len(compared)} in one order")
    yield Finding("gradients", "world", "all reduced")
    copies = {"values": "parameters", "gradients": "gradients", "buffer": "buffers"}
    for kind, shown in copies.items():
        if count := sum(key[0] == kind for key in stated):
            yield Finding(f"copies of {shown}", "world", f"{count} alike")


def _modules_to_compare(state: TrainState) -> dict[str, RankGroup]:
    """Names of modules that ranks have to run together, and which ranks."""
    gathered = set(fsdp_modules(state.model))
    is_compiled = any(one._compiled_call_impl is not None for one in state.model.modules())
    if is_compiled or state.layout.stages is not None:
        return {}  # compiled code runs in place of hooks; stages run modules of their own
    mine: set[tuple[str, RankGroup]] = {
        (name, group)
        for name, module in state.model.named_modules()
        if (group := _group_of(state, name, module, module in gathered)) is not None
    }
    # Ranks without experts have no module to gather there.
    return dict(sorted(mine.intersection(*exchange(mine))))


def _group_of(state: TrainState, name: str, module: nn.Module, gathers: bool) -> RankGroup | None:
    """The ranks that have to run a module together; others may run it more or less often."""
    layout = state.layout
    if gathers or (layout.experts > 1 and "dispatch" in vars(module)):
        return "world"
    if layout.context > 1 and "attend" in vars(module):
        return "cp"
    return "tp" if name in layout.styles else None


@contextmanager
def _comparing(state: TrainState, compared: Mapping[str, RankGroup]) -> Iterator[None]:
    """Before each of these modules the ranks that run it together compare that they do.

    Ranks pair their collectives by order and by nothing else. Where one skips a block that another
    runs, shards of two blocks meet, or ranks wait for each other.
    """
    with ExitStack() as hooks:
        for name, group in compared.items():
            module, at = state.model.get_submodule(name), name or type(state.model).__name__
            # In front of FSDP's own hook.
            hook = partial(compare_modules, state.mesh, at, group)
            hooks.enter_context(module.register_forward_pre_hook(hook, prepend=True))
        yield


def _compare_forward(
    state: TrainState,
    compared: Mapping[str, RankGroup],
    loss_fn: LossFn,
    model: nn.Module,
    batch: TensorDictBase,
) -> Loss:
    """Compute a loss; the backward is not compared, as recomputation runs modules again."""
    try:
        with _comparing(state, compared):
            loss = loss_fn(model, batch)
    except ModulesError:  # on all ranks
        raise
    except Exception as error:
        # The other ranks are at a module, or at the end, and would wait for this one.
        with suppress(ModulesError):
            compare_modules(state.mesh, f"an exception ({type(error).__name__}: {error})")
        raise
    compare_modules(state.mesh)
    return loss
