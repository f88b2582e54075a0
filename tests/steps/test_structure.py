"""What a step costs beside the same step written by hand, counted: no clock, no noise."""

from __future__ import annotations

import attrs
import pytest
from bare import Size, bare_step, our_step
from structure import Counted

MOST_KERNELS = {1: 26, 2: 28, 4: 28}
"""More than the loop by hand, for each number of micro-batches.

Two guards cost the last of them: a mask for each micro-batch, so that NaN which a finite loss sends
back is seen, and the root of the counts, so that one below zero is.
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
