"""Sequences shared by ranks: on real ranks, against attention over whole sequences in float64."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flash_kernels import flash_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import exact_attention, lay_out, logits_loss
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk
from forgekit.data.batch import slice_positions
from forgekit.model.transformer import locate_all
from forgekit.parallel.context import attention_areas, block_attention
from forgekit.parallel.context.attention_areas import areas_of_documents, areas_seen
from forgekit.parallel.context.context_parallel import apply_context, split_context, with_sockets

POSITIONS, CHANNELS = 48, 4
LAYOUTS = {f"ring of {n}": ("ring", n, 1) for n in (2, 4)} | {"both of 4": ("both", 2, 2)}
LAYOUTS |= {f"ulysses of {n}": ("ulysses", 1, n) for n in (2, 4)}
TOLERANCES = {"float64": 1e-12, "float32": 3e-6, "bfloat16": 2e-2}
DOCUMENTS = {
    "none": None,
    "one spans all ranks": [[0] * 3 + [1] * 40 + [2] * 5, [3] * 48],
    "ragged": [[0] * 5 + [1] * 20 + [2] * 6 + [3] * 17, [7] + [6] * 11 + [5] * 12 + [4] * 24],
    "padded": [[0] * 10 + [-1] * 38, [-1] * 3 + [1] * 20 + [-1] * 4 + [2] * 21],
    "only padding": [[-1] * 48, [0] * 24 + [-1] * 24],
    "comes back": [[0] * 10 + [1] * 10 + [0] * 10 + [1] * 18, [0, 1] * 24],
}


PATHS = ("whole", "few queries at a time", "product")


@contextmanager
def taking(path: str) -> Iterator[None]:
    """By one of ``PATHS``: a product is for devices that have no kernel."""
    sizes = {} if path == "whole" else {"MOST_SCORES": 1, "LEAST_QUERIES": 7}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, size in sizes.items():
            monkeypatch.setattr(attention_areas, name, size)
        for module in (attention_areas, block_attention) if path == "product" else ():
            monkeypatch.setattr(module, "has_flash", lambda _: False)
        yield


class Sockets(nn.Module):
    """The least that context parallelism needs."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = fk.model.attend_causal
        self.locate = locate_all


def draw(heads: int, kv_heads: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, POSITIONS, n, CHANNELS) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def mesh_of(world: int) -> Any:
    return fk.build_mesh(fk.MeshSpec(dp_shard=1, cp=world), device="cpu")


def documents_of(name: str) -> Tensor | None:
    rows = DOCUMENTS[name]
    return None if rows is None else torch.tensor(rows)


def positions_of(ring_size: int, ulysses: int, rank: int) -> list[int]:
    """This rank's positions, by hand."""
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    chunk = POSITIONS // (2 * ring_size)
    order = (ring_rank, 2 * ring_size - 1 - ring_rank) if ring_size > 1 else (0, 1)
    places = [number * chunk + i for number in order for i in range(chunk)]
    share = len(places) // ulysses
    return places[ulysses_rank * share : (ulysses_rank + 1) * share]


@cache
def on_one_device(heads: tuple[int, int], dtype: torch.dtype, documents: str) -> list[Tensor]:
    return exact_attention(documents_of(documents), *draw(*heads, dtype))


def attend_slices(
    rank: int, world: int, rows: list[tuple[str, str, str]], cases: list[tuple]
) -> list[list[list[Tensor]]]:
    """Output and gradients of this rank's slices, by row and case of heads and documents."""
    found = []
    for layout, dtype, path in rows:
        method, ring_size, ulysses = LAYOUTS[layout]
        model = Sockets()
        assert apply_context(model, mesh_of(world), method)[:3] == (ring_size, ulysses, rank)
        mine = positions_of(ring_size, ulysses, rank)
        assert model.locate(len(mine), torch.device("cpu")).tolist() == mine
        with taking(path):
            found.append([_attend(model, mine, getattr(torch, dtype), *case) for case in cases])
    return found


def _attend(
    model: Sockets, mine: list[int], dtype: torch.dtype, heads: tuple[int, int], documents: str
) -> list[Tensor]:
    *inputs, upstream = (x[:, mine] for x in draw(*heads, dtype))
    ids = documents_of(documents)
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = model.attend(*inputs, doc_ids=None if ids is None else ids[:, mine])
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


OF_TWO = [("ring of 2", "float32", "whole"), ("ring of 2", "bfloat16", "few queries at a time")]
OF_FOUR = [("ring of 4", "float64", "whole"), ("both of 4", "float64", "product")]
ROWS = {2: [*OF_TWO, ("ulysses of 2", "float64", "whole")], 4: OF_FOUR}
CASES = [*(((8, 2), documents) for documents in DOCUMENTS), ((4, 4), "ragged"), ((4, 1), "padded")]


def check_slices(world: int, rows: list[tuple[str, str, str]], cases: list[tuple]) -> None:
    by_rank = run_again(attend_slices, world, rows, cases)
    for row, (layout, dtype, _) in enumerate(rows):
        for number, (heads, documents) in enumerate(cases):
            whole = on_one_device(heads, getattr(torch, dtype), documents)
            for rank, what in itertools.product(range(world), range(len(whole))):
                exact = whole[what]
                part = exact[:, positions_of(*LAYOUTS[layout][1:], rank)]
                error = (by_rank[rank][row][number][what].double() - part).abs().max()
                assert error <= TOLERANCES[dtype] * exact.abs().max(), (layout, heads, documents)


@pytest.mark.parametrize("world", ROWS)
def test_slices_attend_like_whole_sequences(world):
    check_slices(world, ROWS[world], CASES)


@pytest.mark.oracle
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_attend_like_whole_sequences_in_every_way(layout):
    rows = [(layout, *rest) for rest in itertools.product(TOLERANCES, PATHS)]
    cases = [*itertools.product([(4, 4), (8, 2), (4, 1)], DOCUMENTS)]
    check_slices(math.prod(LAYOUTS[layout][1:]), rows, cases)


@pytest.mark.parametrize("path", ["whole", "product"])
def test_large_scores_do_not_overflow(path):
    q, k, v = (200 * x.transpose(1, 2) for x in draw(4, 4, torch.float32)[:3])
    with taking(path):
        out, lse = block_attention.attend_block(q, k, v, None, None, "sdpa")
    assert lse.max() > 1e4
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)


SPEC = fk.TransformerSpec(
    vocab_size=23, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=24, max_seq_len=POSITIONS
)


def ring_of(world: int) -> Sockets:
    model = Sockets()
    apply_context(model, mesh_of(world), "ring")
    return model


def keep(rank: int, world: int) -> None:
    """Numbers that are kept for backward belong to the slice; strides do not matter."""
    model = ring_of(world)
    inputs = [x[:, positions_of(world, 1, rank)] for x in draw(8, 2, torch.float32)[:3]]
    inputs = [x.clone().requires_grad_() for x in inputs]
    kept: list[int] = []
    note = lambda x: kept.append(x.numel()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = model.attend(*inputs)
    logarithms = out.numel() // CHANNELS
    assert sum(kept) == sum(x.numel() for x in (*inputs, out)) + logarithms
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs]
    again = model.attend(*strided)
    # The gradient of a sum has no strides at all.
    found = again, *torch.autograd.grad(again.sum(), strided)
    wanted = out, *torch.autograd.grad(out, inputs, torch.ones_like(out))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_kept_for_backward_stays_with_the_slice():
    run_again(keep, 4)


def ring_of_two(rank: int, world: int) -> None:
    """Documents changed in place are noticed; every rank can run whole sequences for a while."""
    ring, mine = ring_of(world), positions_of(world, 1, rank)
    inputs = [x[:, mine] for x in draw(4, 2, torch.float64)[:3]]
    here = documents_of("ragged")[:, mine].clone()
    ring.attend(*inputs, doc_ids=here)
    here.fill_(3)
    found, wanted = ring.attend(*inputs, doc_ids=here), ring.attend(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    model, ids = fk.Transformer(SPEC), torch.arange(7)[None]
    wanted = model(ids)
    sockets = apply_context(model, mesh_of(world), "ring").sockets
    attend, locate = model.layers[0].attention.attend, model.locate
    with suppress(ZeroDivisionError), with_sockets(model, sockets):
        assert torch.equal(model(ids), wanted)
        _ = 1 / 0
    assert model.layers[0].attention.attend is attend
    assert model.locate is locate
    copy.deepcopy(attend)


def test_changed_documents_are_noticed_and_whole_sequences_can_be_run():
    run_again(ring_of_two, 2)


def refuse(rank: int, world: int) -> None:
    """Each of these on one rank alone: nothing may be sent before it is refused."""
    for context, method, heads_of_rank, message in [
        (9, "both", 8, r"cp 9 needs ulysses to be one of \[3\] and to divide the 8"),
        (4, "ulysses", 6, r"6 query heads .* by ulysses = 4\. Use one of \[1, 2, 3, 6\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            split_context(context, method, heads_of_rank)
    mesh = mesh_of(world)
    with pytest.raises(ValueError, match=r"no module of Linear has an 'attend' socket for cp 2\."):
        apply_context(nn.Linear(2, 2), mesh, "ring")
    with flash_kernels(), pytest.raises(ValueError, match="'varlen', but it cannot compute ring"):
        fk.parallelize(fk.Transformer(SPEC), mesh, precision="bf16", attention="varlen")
    state, ids = lay_out(fk.Transformer(SPEC), {"cp": world}), torch.zeros(1, 52, dtype=torch.int64)
    with pytest.raises(ValueError, match="has 52 positions, more than max_seq_len, which is 48"):
        fk.accumulate(state, [TensorDict({"input_ids": ids, "labels": ids}, [1])], logits_loss)
    ring_model, ulysses_model = ring_of(world), Sockets()
    apply_context(ulysses_model, mesh, "ulysses")
    if rank:
        return
    q, k = torch.zeros(1, 4, 2, 4), torch.zeros(1, 4, 1, 4)
    for model in (ring_model, ulysses_model):
        with pytest.raises(ValueError, match="k must divide h"):
            model.attend(q, k.expand(1, 4, 3, 4), k.expand(1, 4, 3, 4))
        with pytest.raises(ValueError, match=r"doc_ids is \(1, 8\); .*, \(1, 4\)\."):
            model.attend(q, k, k, doc_ids=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="has 3 positions, an odd number"):
        ring_model.attend(q[:, :3], k[:, :3], k[:, :3])
    with pytest.raises(ValueError, match=r"1 query heads"):
        ulysses_model.attend(q[:, :, :1], k, k)


def test_what_does_not_fit_is_refused_before_anything_is_sent():
    run_ranks(refuse, 2)


@given(
    world=st.integers(2, 4),
    rows=st.lists(st.lists(st.integers(-1, 3), min_size=24, max_size=24), min_size=1, max_size=3),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_documents_cut_areas_to_the_pairs_that_share_one(world, rows, data):
    """Each of those pairs once, and no other."""
    ranks = [data.draw(st.integers(0, world - 1)) for _ in range(2)]
    ids = torch.tensor(rows)[:, : 24 // (2 * world) * 2 * world]
    everywhere = torch.arange(ids.shape[1])
    here, there = (slice_positions(everywhere, rank=r, world=world) for r in ranks)
    queries, keys = ids[:, here], ids[:, there]
    wanted = (there <= here[:, None]) & (queries[:, :, None] == keys[:, None])
    counts = torch.zeros(wanted.shape, dtype=torch.int64)
    for area in areas_seen(*ranks, len(here)):
        for part in areas_of_documents(area, queries, keys):
            where = part.rows, part.queries, part.keys
            block = torch.ones_like(counts[where])
            counts[where] += block if part.offset is None else block.tril(part.offset)
    assert torch.equal(counts, wanted.long())
