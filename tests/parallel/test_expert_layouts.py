"""Layers of experts on every layout of ep and tp: the step of one process, uneven experts too."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from covering import first_of
from lab import full, full_tensors, relative_error
from pool import run_ranks
from steps.test_experts import balance, is_same, loss_fn, routed, rows, split

import forgekit as fk
from forgekit.mesh import data_ranks

MOE = fk.MoESpec(
    experts=7,
    top_k=2,
    ffn_dim=8,
    shared=2,
    first=1,
    every=2,
    scale=1.7,
    aux_loss=0.3,
    z_loss=0.05,
    sequence_aux_loss=0.2,
    bias_rate=0.02,
)
SPEC = fk.TransformerSpec(
    vocab_size=20, dim=16, layers=4, heads=2, kv_heads=2, ffn_dim=24, max_seq_len=12, moe=MOE
)
POSITIONS = 12
LIMIT = 0.05
"""Below the gradient's norm, so that the one factor clips."""
LAYOUTS = {
    "TP2": (2, {"tp": 2}, 6),
    "EP2xTP2": (4, {"dp_shard": 2, "tp": 2, "ep": 2}, 6),
    "EP2, 3 experts": (2, {"ep": 2}, 3),
    "EP4, 7 experts": (4, {"ep": 4}, 7),
    "EP2xFSDP2": (4, {"ep": 2}, 6),
    "EP2xTP2, 3 experts": (4, {"dp_shard": 2, "tp": 2, "ep": 2}, 3),
    "EP4xTP2, 7 experts": (8, {"dp_shard": 4, "tp": 2, "ep": 4}, 7),
    "EP2xHSDP2xTP2": (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, 6),
    "EP2xFSDP2xTP2": (8, {"dp_shard": 4, "tp": 2, "ep": 2}, 6),
}


def build(dtype=torch.float64, **changes):
    """A model with scores far apart, loads that are not even, and an expert 100 times the rest."""
    model = fk.Transformer(attrs.evolve(SPEC, moe=attrs.evolve(MOE, **changes))).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(12)
        for layer in routed(model):
            layer.experts.down[0].mul_(10)
            load = torch.rand(layer.spec.experts, generator=generator) + 0.1
            layer.router.load.copy_(load / load.sum())
    return model


def create(model, **options):
    return fk.TrainState.create(model, torch.optim.SGD(model.parameters()), **options)


def train(state, shares, sizes=(4, 4)):
    """Two clipped steps: gradients and counts of the first, and what is left by both."""
    for index in range(2):
        batches = [shares(batch) for batch in split(rows(index, positions=POSITIONS), sizes)]
        totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
        if index == 0:
            gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
            counts = totals.sums["experts", "counts"].tolist()
            assert fk.clip(totals).grad_norm > 2 * LIMIT
        state = fk.update(state, fk.clip(totals, LIMIT), lr=0.05, totals=totals)
    return gradients, counts, balance(state), full_tensors(state.model)


def whole(batch):
    return batch


def mine(mesh):
    """What takes this rank's rows of a batch."""
    rank, ranks = data_ranks(mesh)
    return lambda batch: batch[rank::ranks].contiguous()


def _train(rank, world, sizes, changes, options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    state = create(fk.parallelize(build(**changes), mesh, **options), mesh=mesh)
    sizes = (4, 4) if data_ranks(mesh)[1] <= 4 else (8,)  # no rank without a row
    return train(state, mine(mesh), sizes)


def error(found, expected):
    """The worst error of any kind of parameter, each on its own scale."""
    assert found.keys() == expected.keys()
    kinds = {}
    for name in expected:
        kind = next((k for k in (".router.", ".shared.", ".experts.") if k in name), "dense")
        kinds.setdefault(kind, []).append(name)
    return max(
        relative_error(*({name: tensors[name] for name in names} for tensors in (found, expected)))
        for names in kinds.values()
    )


SOME = [("EP2xTP2, 3 experts", "selective", {}), ("EP4, 7 experts", "full", {})]
MORE = [
    ("TP2", "full", {"shared": 0}),
    ("TP2", "selective", {"router": "sigmoid", "groups": 3, "top_groups": 2}),
    *itertools.product(LAYOUTS, ("none", "full", "selective"), ({},)),
]


@pytest.mark.parametrize(("layout", "what", "changes"), first_of(SOME, MORE))
def test_each_layout_takes_the_steps_of_one_process(layout, what, changes):
    world, sizes, experts = LAYOUTS[layout]
    changes = {"experts": experts, **changes}
    gradients, counts, balanced, after = train(create(build(**changes)), whole)
    options = {"activation_checkpoint": what}
    for found in run_ranks(_train, world, sizes, changes, options, timeout_s=20 * world):
        assert error(found[0], gradients) < 1e-10
        assert found[1] == counts
        assert is_same(found[2], balanced)
        assert error(found[3], after) < 1e-10


def _from_meta(rank, world, sizes, spec):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(spec)
    assert routed(model)[0].router.load.is_meta
    state = create(fk.parallelize(model, mesh, seed=5), mesh=mesh)
    held = {tuple(layer.experts.gate.to_local().shape) for layer in routed(model)}
    return full_tensors(state.model), balance(state), held


def test_parameters_and_buffers_from_meta_are_those_of_one_process():
    world, sizes, experts = LAYOUTS["EP2xTP2, 3 experts"]
    spec = attrs.evolve(SPEC, moe=attrs.evolve(MOE, experts=experts))
    expected = full_tensors(fk.Transformer(spec, seed=5))
    even, zero = torch.full((experts,), 1 / experts), torch.zeros(experts)
    for rank, (found, balanced, held) in enumerate(run_ranks(_from_meta, world, sizes, spec)):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert is_same(balanced, [even, zero] * 2)
        assert held == {(2 if rank < 2 else 1, 4, 16)}


# Checkpoints


def _contents(state):
    named = dict(state.model.named_parameters())
    moments = {
        f"{name}/{key}": full(value).clone()
        for name, parameter in named.items()
        for key, value in state.optimizer.state[parameter].items()
    }
    buffers = {name: b.clone() for name, b in state.model.named_buffers()}
    return {**full_tensors(state.model), **moments, **buffers}


def _adamw(model, **options):
    return fk.TrainState.create(model, fk.adamw(model), **options)


def _step(state, shares):
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    return step(state, [shares(rows(state.step, positions=POSITIONS))])[0]


def _pass_on(rank, world, sizes, source, target):
    """Go on from a checkpoint, train one step more and save; what was loaded, what was saved."""
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    model = fk.parallelize(fk.Transformer(SPEC, seed=9).double(), mesh)
    state = _adamw(model, mesh=mesh)
    state = fk.checkpoint_load(state, source)
    loaded = _contents(state)
    state = _step(state, mine(mesh))
    fk.checkpoint_save(state, target).wait()
    return loaded, _contents(state)


CHAIN = ("EP2xFSDP2", "EP4, 7 experts", "EP2xTP2")


@pytest.mark.parametrize(
    "chain", [CHAIN[1:2], pytest.param(CHAIN, marks=pytest.mark.oracle)], ids=["one", "all"]
)
def test_checkpoints_move_between_any_numbers_of_expert_ranks(chain, tmp_path):
    """One process, ep 2, ep 4 (2, 2, 2 and 1), ep 2 beside tp, and one process again."""
    state = _step(_adamw(build()), whole)
    fk.checkpoint_save(state, tmp_path / "0", blocking=True)
    saved = _contents(state)
    assert saved["layers.1.feed_forward.router.selection_bias"].abs().max() > 0.01
    for number, layout in enumerate(chain):
        world, sizes, _ = LAYOUTS[layout]
        paths = tmp_path / str(number), tmp_path / str(number + 1)
        by_rank = run_ranks(_pass_on, world, sizes, *paths)
        for loaded, _ in by_rank:
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        saved = by_rank[0][1]
    loaded = _contents(fk.checkpoint_load(_adamw(fk.Transformer(SPEC, seed=9).double()), paths[1]))
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


# What travels


def _exchange(rank, world, sizes, changes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    state = create(fk.parallelize(build(**changes), mesh), mesh=mesh)
    events, send = [], dist.all_to_all_single

    def watched(arrived, rows, *args, **options):
        events.append(("send", rows.numel() * rows.element_size(), rows.dtype))
        work = send(arrived, rows, *args, **options)
        return Watched(work, events) if options.get("async_op") else work

    for layer in routed(state.model):
        layer.shared.register_forward_hook(lambda *_: events.append(("shared",)))
        layer.shared.down.register_full_backward_hook(lambda *_: events.append(("shared back",)))
    with patch.object(dist, "all_to_all_single", watched):
        batches = [mine(mesh)(b) for b in split(rows(positions=POSITIONS), [4, 4])]
        totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    noted = [totals["experts", name].tolist() for name in ("counts", "kept")]
    return gradients, events, *noted


class Watched:
    """Work under way that says when it is waited for."""

    def __init__(self, work, events):
        self.work, self.events = work, events

    def wait(self):
        self.events.append(("wait",))
        return self.work.wait()


@pytest.mark.parametrize("capacity", [0.9, pytest.param(None, marks=pytest.mark.oracle)])
def test_routed_tokens_travel_and_nothing_else(capacity):
    """Four exchanges of the rows that are computed, in forward and back, and the numbers of them.

    With a capacity each rank is a micro-batch of its own: the share that it drops is that of one
    process which takes them one by one.
    """
    changes = {"capacity": capacity, "experts": 3}
    state = create(build(**changes))
    apart = [b[rank::2] for b in split(rows(positions=POSITIONS), [4, 4]) for rank in range(2)]
    totals = fk.reduce_totals(fk.accumulate(state, apart, loss_fn), state)
    expected = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    by_rank = run_ranks(_exchange, 2, {"ep": 2}, changes)
    for gradients, _, counts, kept in by_rank:
        assert error(gradients, expected) < 1e-10
        assert counts == totals["experts", "counts"].tolist()
        assert kept == totals["experts", "kept"].tolist()
    computed, choices = sum(kept), sum(map(sum, counts))
    assert (computed < choices) == (capacity is not None)
    sent = [event[1:] for _, events, *_ in by_rank for event in events if event[0] == "send"]
    dim, item, ranks, layers, micros, each = 16, 8, 2, 2, 2, 2
    numbers = [size for size, dtype in sent if dtype == torch.int64]
    assert numbers == [ranks * each * 8] * (ranks * layers * micros)
    assert sum(size for size, dtype in sent if dtype == torch.float64) == 4 * computed * dim * item
    # Shared experts compute while tokens are on their way, on each rank in the same order.
    orders = [[event[0] for event in events] for _, events, *_ in by_rank]
    forward = ["send", "send", "shared", "wait", "send", "wait"]
    backward = ["send", "wait", "send", "shared back", "wait"]
    assert orders == [(forward * 2 + backward * 2) * 2] * 2
