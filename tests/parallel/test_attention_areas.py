"""What the steps of a ring compute: each pair that may attend once, no other, and equal work."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forgekit.data.batch import slice_positions
from forgekit.parallel.context.attention_areas import (
    Area,
    areas_of_documents,
    areas_seen,
)


def pairs_of(area: Area, rows: int, positions: int) -> Tensor:
    """How often each ``[b s s]`` pair is computed."""
    seen = torch.zeros(rows, positions, positions, dtype=torch.int64)
    block = torch.ones_like(seen[area.rows, area.queries, area.keys])
    if area.offset is not None:
        block = block.tril(area.offset)
    seen[area.rows, area.queries, area.keys] += block
    return seen


def expected(rank: int, source: int, world: int, positions: int, ids: Tensor) -> Tensor:
    """The same from global positions and documents alone."""
    everywhere = torch.arange(positions)
    here, there = (slice_positions(everywhere, rank=r, world=world) for r in (rank, source))
    same = ids[:, here][:, :, None] == ids[:, there][:, None, :]
    return ((there[None, :] <= here[:, None]) & same).long()


def slices_of(ids: Tensor, world: int) -> list[Tensor]:
    return [slice_positions(ids, rank=r, world=world, dim=1) for r in range(world)]


@given(
    world=st.integers(2, 4),
    rows=st.lists(st.lists(st.integers(-1, 3), min_size=24, max_size=24), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_documents_cut_areas_to_the_pairs_that_share_one(world, rows, data):
    rank, source = (data.draw(st.integers(0, world - 1)) for _ in range(2))
    ids = torch.tensor(rows)[:, : 24 // (2 * world) * 2 * world]
    positions = ids.shape[1] // world
    slices = slices_of(ids, world)
    parts = [
        part
        for area in areas_seen(rank, source, positions)
        for part in areas_of_documents(area, slices[rank], slices[source])
    ]
    seen = sum((pairs_of(part, len(ids), positions) for part in parts), torch.tensor(0))
    wanted = expected(rank, source, world, ids.shape[1], ids)
    assert torch.equal(seen.expand_as(wanted), wanted)
