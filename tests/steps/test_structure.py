"""What a step costs beside the same step written by hand, counted: no clock, no noise."""

from __future__ import annotations

import attrs
import pytest
from bare import Size, bare_step, our_step
from structure import Counted

MOST_KERNELS = {1: 22, 2: 22, 4: 18}
"""More than the loop by hand, for each number of micro-batches.

They pay for what the loop does not have: masked rows may hold NaN, a count below zero and a step
that is not finite change nothing, and metrics, counters and the learning rate stay on the device.
"""

SIZE = Size(dim=16, layers=1, seq_len=8, vocab_size=32, rows=2)


def count(build, size):
    step = build(size.model(), size.batches())
    step()  # the optimizer makes its moments
    with Counted() as counted:
        step()
    return counted


@pytest.mark.parametrize("micro_batches", MOST_KERNELS)
def test_a_step_launches_few_kernels_more_than_a_loop_by_hand_and_reads_nothing(micro_batches):
    size = attrs.evolve(SIZE, micro_batches=micro_batches)
    bare, ours = count(bare_step, size), count(our_step, size)
    more = ours.kernels.total() - bare.kernels.total()
    assert more <= MOST_KERNELS[micro_batches], (
        ours.kernels - bare.kernels,
        bare.kernels - ours.kernels,
    )
    assert not ours.reads
    assert not ours.collectives
