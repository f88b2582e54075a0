"""What the steps of a ring compute: each pair that may attend once, no other, and equal work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forgekit.data.batch import slice_positions
from forgekit.parallel.context import attention_areas
from forgekit.parallel.context.attention_areas import (
    Area,
    areas_of_documents,
    areas_of_queries,
    areas_seen,
)

HEADS = 2


def pairs_of(area: Area, ids: tuple[Tensor, Tensor] | None, rows: int, places: int) -> Tensor:
    """How often each ``[b s s]`` pair is computed and counts."""
    seen = torch.zeros(rows, places, places, dtype=torch.int64)
    block = torch.ones_like(seen[area.rows, area.queries, area.keys])
    if area.offset is not None:
        block = block.tril(area.offset)
    if area.is_masked:
        assert ids is not None
        queries, keys = ids[0][area.rows, area.queries], ids[1][area.rows, area.keys]
        block = block * (queries[:, :, None] == keys[:, None, :])
    seen[area.rows, area.queries, area.keys] += block
    return seen


def expected(rank: int, source: int, world: int, places: int, ids: Tensor) -> Tensor:
    """The same from global places and documents alone."""
    everywhere = torch.arange(places)
    here, there = (slice_positions(everywhere, rank=r, world=world) for r in (rank, source))
    same = ids[:, here][:, :, None] == ids[:, there][:, None, :]
    return ((there[None, :] <= here[:, None]) & same).long()


def slices_of(ids: Tensor, world: int) -> list[Tensor]:
    return [slice_positions(ids, rank=r, world=world, dim=1) for r in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_causal_pair_is_seen_once(world):
    ids, places = torch.zeros(1, 8 * world), 8
    for rank in range(world):
        for source in range(world):
            seen = sum(pairs_of(area, None, 1, places) for area in areas_seen(rank, source, places))
            assert torch.equal(seen, expected(rank, source, world, 8 * world, ids))


@pytest.mark.parametrize("world", [2, 5, 8])
def test_all_ranks_have_as_much_to_do_in_every_step(world):
    for step in range(world):
        slices = [areas_seen(r, (r - step) % world, 16) for r in range(world)]
        pairs = [sum(int(pairs_of(area, None, 1, 16).sum()) for area in seen) for seen in slices]
        assert set(pairs) == {128 if step else 136}


@given(
    world=st.integers(2, 4),
    rows=st.lists(st.lists(st.integers(-1, 3), min_size=24, max_size=24), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_documents_cut_areas_to_the_pairs_that_share_one(world, rows, data):
    rank, source = (data.draw(st.integers(0, world - 1)) for _ in range(2))
    ids = torch.tensor(rows)[:, : 24 // (2 * world) * 2 * world]
    places = ids.shape[1] // world
    slices = slices_of(ids, world)
    parts = [
        part
        for area in areas_seen(rank, source, places)
        for part in areas_of_documents(area, slices[rank], slices[source])
    ]
    pair = slices[rank], slices[source]
    seen = sum((pairs_of(part, pair, len(ids), places) for part in parts), torch.tensor(0))
    wanted = expected(rank, source, world, ids.shape[1], ids)
    assert torch.equal(seen.expand_as(wanted), wanted)


@pytest.mark.parametrize("most", [1, 40, 10**9])
@pytest.mark.parametrize(("rank", "source"), [(0, 0), (1, 0), (0, 1)])
def test_blocks_of_queries_see_the_same(monkeypatch, most, rank, source):
    monkeypatch.setattr(attention_areas, "MOST_SCORES", most)
    monkeypatch.setattr(attention_areas, "LEAST_QUERIES", 3)
    for area in areas_seen(rank, source, 16):
        parts = areas_of_queries(area, 1, HEADS, is_masked=False)
        seen = sum(pairs_of(part, None, 1, 16) for part in parts)
        assert torch.equal(seen, pairs_of(area, None, 1, 16))
        assert len(parts) > 1 or most == 10**9
