"""A step runs the collectives that its layout needs, and one more."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from covering import some_of
from distributed.cells import LaidOut, own_batches
from distributed.matrix import LAYOUTS, SINGLE, Cell, Row
from distributed.models import logits_loss
from pool import run_again

import forgekit as fk
from forgekit.plan.watch import StepWatch

V_SHAPED = ("zbv", "dualpipev")


def _cell(layout: str) -> Cell:
    return Cell(layout, LAYOUTS[layout].micros[1], "ragged", True, "none", "logits")


def _count(rank, world, layout):
    """Collectives of the second and the third step, which report all that a step can report.

    The first learns shapes and names.
    """
    cell = _cell(layout)
    state = LaidOut(cell).state(fk.adamw)
    loss_fn = fk.losses_by_source(logits_loss, ("code", "prose"))
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01), spikes=fk.SpikeLimit())
    counted = []
    for index in range(3):
        batches = own_batches(cell, state.mesh, index)
        for batch in batches:
            batch["source"] = torch.arange(len(batch)) % 2
        with StepWatch() as watch:
            state, _ = step(state, batches)
        calls = watch.work.calls.elements()
        counted.append(Counter(call.op for call in calls if len(call.ranks) > 1))  # else none moves
    return counted[1:]


KINDS = {"tp2", "cp2-ring", "ep2", "pp2-fsdp2"}
"""Each mesh dimension."""


@pytest.mark.parametrize("layout", some_of(LAYOUTS, *(LAYOUTS.keys() - KINDS)))
def test_a_step_runs_what_its_layout_needs_and_one_more(layout):
    row, micros = LAYOUTS[layout], _cell(layout).micros
    for rank, (second, third) in enumerate(run_again(_count, row.world, layout)):
        assert second == third == _needed(row, micros, rank) + Counter(all_reduce=1)


def _needed(row: Row, micros: int, rank: int) -> Counter[str]:
    """Everything but the one, for a rank."""
    stages, count = _stages(row, rank)
    blocks = row.layers * len(stages) // count
    needed = _fsdp(row, micros, blocks, len(stages)) + _pipeline(row, micros, rank)
    needed += _tensor(row, micros, blocks, 0 in stages, count - 1 in stages)
    return needed + _context(row, micros, blocks) + _experts(row, micros, blocks)


def _stages(row: Row, rank: int) -> tuple[list[int], int]:
    """The stages of a rank, and how many there are."""
    ranks, schedule = row.size("pp"), row.options.get("pipeline_schedule", "1f1b")
    place = rank // (row.world // ranks)
    if schedule in SINGLE:
        return [place], ranks
    second = 2 * ranks - 1 - place if schedule in V_SHAPED else place + ranks
    return [place, second], 2 * ranks


def _fsdp(row: Row, micros: int, blocks: int, roots: int) -> Counter[str]:
    """Parameters are gathered for use, gradients scattered once and summed over replicas once.

    Forward and backward gather each block; the root (embedding, norm, output) stays in between.
    Pipeline stages gather everything once for the whole step.
    """
    needed, once = Counter(), blocks + roots
    if row.size("dp_shard") * row.size("cp") > 1:
        each = micros * (2 * blocks + roots)
        needed.update(all_gather=once if row.size("pp") > 1 else each, reduce_scatter=once)
    if row.size("dp_replicate") > 1:
        needed.update(all_reduce=once)
    return needed


def _tensor(row: Row, micros: int, blocks: int, is_first: bool, is_last: bool) -> Counter[str]:
    """Places are gathered before the matrices of a branch and sums scattered after them.

    In backward the same the other way round: two of each in a block. The embedding's sum is
    scattered and the last norm's places are gathered. The loss gathers once what the ranks know of
    their part of the vocabulary. A step sums the gradients of norms: four in a block, and the last.
    """
    if row.size("tp") == 1:
        return Counter()
    gathers = 4 * blocks + is_first + 2 * is_last
    scatters = 4 * blocks + is_first + is_last
    return Counter(
        all_gather=micros * gathers,
        reduce_scatter=micros * scatters,
        all_reduce=4 * blocks + is_last,
    )


def _context(row: Row, micros: int, blocks: int) -> Counter[str]:
    """A ring of n passes keys and values on n-1 times, twice, and their gradients n times.

    Ulysses exchanges places for heads before and after attention, in backward too. Documents are
    gathered once for each micro-batch and way.
    """
    ranks, method = row.size("cp"), row.options.get("context_parallel", "ring")
    if ranks == 1:
        return Counter()
    needed: Counter[str] = Counter()
    if method in ("ring", "both"):
        sent = micros * blocks * (3 * (2 if method == "both" else ranks) - 2)
        needed.update(all_gather=micros, send=sent, recv=sent)
    if method in ("ulysses", "both"):
        needed.update(all_gather=micros, all_to_all=4 * micros * blocks)
    return needed


def _pipeline(row: Row, micros: int, rank: int) -> Counter[str]:
    """Each stage passes on each micro-batch, and its gradient back, to another rank.

    Before, the ranks compare what they are about to run: a difference would leave them waiting.
    """
    ranks = row.size("pp")
    if ranks == 1:
        return Counter()
    others = row.world // ranks
    owners = {stage: p for p in range(ranks) for stage in _stages(row, p * others)[0]}
    mine, count = _stages(row, rank)
    passed = [
        (stage, other)
        for stage in mine
        for other in (stage - 1, stage + 1)
        if 0 <= other < count and owners[other] != owners[stage]
    ]
    return Counter(all_reduce=1, send=micros * len(passed), recv=micros * len(passed))


def _experts(row: Row, micros: int, blocks: int) -> Counter[str]:
    """Tokens go to their experts and back, in backward too; before, how many come.

    Experts that are spread further are gathered and scattered on their own.
    """
    if not row.experts:
        return Counter()
    needed = Counter(all_to_all=5 * micros * blocks)
    if row.size("dp_shard") * row.size("cp") > row.size("ep"):
        needed.update(all_gather=2 * micros * blocks, reduce_scatter=blocks)
    return needed
