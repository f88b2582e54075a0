"""Habits between steps: looks at the model, hooks, wrappers, new parameters, skipped blocks."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from covering import first_of, in_turn
from lab import (
    alone,
    full_tensors,
    is_kept,
    lay_out,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
    token_rows,
)
from pool import on_ranks, run_again
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.model.layers import Block

WIDTH, WORDS = 8, 10
PLAN = {"embed": "embedding", "layers.*.0": "colwise", "layers.*.2": "rowwise", "top": "colwise"}
LAYOUTS = {
    "fsdp": {"sizes": {}},
    "hsdp": {"sizes": {"dp_replicate": 2, "dp_shard": 1}},
    "tp": {"sizes": {"tp": 2, "dp_shard": 1}, "plan": PLAN},
}


class _Model(nn.Module):
    def __init__(self, skips=()):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(self._block() for _ in range(2))
        self.top = nn.Linear(WIDTH, WORDS)
        self.skips, self.calls = skips, 0
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    @staticmethod
    def _block():
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, ids):
        x, call = self.embed(ids), self.calls
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if (number, call) not in self.skips:
                x = x + layer(x)
        return self.top(x)


def _loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def _batches(at, seed=0):
    return [token_rows(2, 5, WORDS, 100 * seed + 10 * at + n) for n in range(3)]


def _all_batches(state, seed=0, ranks=2):
    """This rank's micro-batches; in one process those of all data-parallel ranks."""
    at, _ = fk.data_ranks(state.mesh)
    return (
        _batches(at, seed) if state.mesh else [b for r in range(ranks) for b in _batches(r, seed)]
    )


def _sgd(model):
    return torch.optim.SGD(model.parameters())


def _state(layout, model=None, **options):
    given = dict(LAYOUTS[layout])
    return lay_out(model or _Model().double(), given.pop("sizes"), _sgd, **given, **options)


def _alone(model=None):
    return alone(model or _Model().double(), _sgd)


def _peek(state):
    with torch.no_grad():
        state.model(_batches(9)[0]["input_ids"])


def _gradients(state, ranks=2):
    return mean_gradients(state, _all_batches(state, ranks=ranks), _loss)


def _look_before_the_update(state, ranks):
    totals = fk.accumulate(state, _all_batches(state, 1, ranks), _loss)
    totals = fk.reduce_totals(totals, state)
    _peek(state)
    return fk.update(state, fk.clip(totals), lr=0.3, totals=totals)


def _look_and_edit(state, ranks):
    _peek(state)
    with torch.no_grad():
        for parameter in state.optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)
    return state


HABITS = {"look, update": _look_before_the_update, "look, edit": _look_and_edit}


def _after_a_look(rank, world, layout, habit):
    return _gradients(HABITS[habit](_state(layout), 2))


@pytest.mark.parametrize(("layout", "habit"), in_turn(list(LAYOUTS), list(HABITS)))
def test_a_step_after_a_look_uses_the_weights_of_now(layout, habit):
    """A forward without a backward leaves FSDP's root gathered, with the weights of then."""
    ranks = 1 if layout == "tp" else 2
    expected = _gradients(HABITS[habit](_alone(), ranks), ranks)
    for found in run_again(_after_a_look, 2, layout, habit):
        assert relative_error(found, expected) < 1e-10


@on_ranks(2)
def test_hooks_that_sharding_would_lose_or_fsdp_never_calls_are_refused(rank, world):
    for layout, kind in (("fsdp", "register_hook"), ("tp", "register_post_accumulate_grad_hook")):
        model = _Model().double()
        getattr(model.layers[0][0].weight, kind)(lambda tensor: None)
        with pytest.raises(ValueError, match=r"'layers.0.0.weight' has a gradient hook, .* after"):
            _state(layout, model)
    state = _state("hsdp")
    handle = state.model.top.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ValueError, match=r"'top.weight' has a .* hook, which FSDP never calls"):
        _gradients(state)
    handle.remove()
    batches = [batch for at in range(world) for batch in _batches(at)]
    expected, _ = reference_gradients(_Model(), [batches], _loss)
    assert relative_error(_gradients(state), expected) < 1e-10


@pytest.mark.parametrize(
    ("sizes", "options"), [({"tp": 2}, {"plan": PLAN}), ({"pp": 2}, {})], ids=["tp", "pp"]
)
@on_ranks(2, keep=True)
def test_a_wrapper_around_a_model_that_ranks_share_is_refused(rank, world, sizes, options):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device="cpu")
    model = nn.Sequential(fk.parallelize(_Model().double(), mesh, **options))
    with pytest.raises(
        ValueError, match=r"Sequential is not the model that forgekit.parallelize .* [tp]p=2"
    ):
        fk.TrainState.create(model, fk.adamw(model), mesh=mesh)


@on_ranks(2, keep=True)
def test_parameters_that_are_added_later_and_not_sharded_are_refused(rank, world):
    state = _state("tp")
    before = full_tensors(state.model)
    added = nn.Linear(WIDTH, WORDS).double()
    state.optimizer.add_param_group({"params": list(added.parameters())})
    with pytest.raises(ValueError, match=r"optimizer holds 2 parameters .*\(10, 8\).* not sharded"):
        _gradients(state)
    assert is_kept(state.model, before)


class _Branch(nn.Module):
    """The third is never used; the second where data say so."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, use):
        return self.a(x).tanh() + (self.b(x) * use if use else 0)


class _Stack(nn.Module):
    """Blocks with parts that few micro-batches use; a block that the others skip is one itself."""

    def __init__(self, skips):
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([_Branch() for _ in range(4)])
        self.top = nn.Linear(WIDTH, WORDS)
        self.skips = skips

    def forward(self, ids, use):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 2 and use == 0):
                x = layer(x, use)
        return self.top(x)


def _branch_loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"], float(batch["use"][0])), batch["labels"])


USES = {
    "in the last": ((0, 0, 2), (0, 0, 2)),
    "in the first": ((2, 0, 0), (2, 0, 0)),
    "by data": ((0, 2, 0), (0, 0, 2)),
    "by data, last": ((0, 0, 0), (0, 0, 2)),
    "never": ((0,) * 3, (0,) * 3),
}
WAYS = {
    "fp32": ({}, {}, "last", 1e-6),
    "bf16": ({}, {"precision": "bf16"}, "last", 3e-2),
    "fp16, every": ({}, {"precision": "fp16"}, "every", 3e-3),
    "zbv": ({"pp": 2}, {"precision": "bf16", "pipeline_schedule": "zbv"}, "last", 3e-2),
}


def _using(at, uses):
    batches = _batches(at)
    for batch, use in zip(batches, USES[uses][at], strict=True):
        batch["use"] = torch.full((2,), use)
    return batches + batches[:1]  # as a pipeline needs them


def _skips(uses, way):
    """Ranks skip a block together or not at all, and stages never."""
    return not uses.startswith("by data") and way != "zbv"


def _mixed(rank, world, uses, way):
    sizes, options, sync, _ = WAYS[way]
    state = lay_out(_Stack(_skips(uses, way)), sizes, **options)
    batches = _using(fk.data_ranks(state.mesh)[0], uses)
    return mean_gradients(state, batches, _branch_loss, sync=sync)


SOME = [
    ("in the last", "bf16"),
    ("in the last", "zbv"),
    ("in the first", "fp16, every"),
    ("by data", "bf16"),
    ("by data, last", "fp32"),
    ("never", "bf16"),
]


@pytest.mark.parametrize(("uses", "way"), first_of(SOME, product(USES, WAYS)))
def test_parameters_and_blocks_that_are_used_late_or_never_are_exact(uses, way):
    """And those beside them in what FSDP sends."""
    sizes, *_, bound = WAYS[way]
    batches = [b for at in range(2 // sizes.get("pp", 1)) for b in _using(at, uses)]
    model = _Stack(_skips(uses, way)).double()
    expected = mean_gradients(alone(model), batches, _branch_loss)
    found = {}
    for gradients in run_again(_mixed, 2, uses, way):
        found |= gradients
    assert relative_error(found, expected) < bound
    assert all(found[name].any() == expected[name].any() for name in expected)


APART = {
    "all blocks": (
        [[(0, 0), (1, 0)], []],
        r"rank 0 is at (the end of loss_fn|top) and rank 1 at layers\.0",
    ),
    # Two calls of the model come before it where a plan is proved.
    "in the step alone": ([[], [(0, 2)]], r"rank 0 is at layers\.0 and rank 1 at layers\.1"),
}


@pytest.mark.parametrize(
    ("layout", "case"), [("hsdp", "all blocks"), ("tp", "all blocks"), ("tp", "in the step alone")]
)
@on_ranks(2, keep=True)
def test_blocks_that_ranks_skip_apart_are_refused(rank, world, layout, case):
    skips, message = APART[case]
    state = _state(layout, _Model(skips[rank]).double())
    with pytest.raises(ValueError, match=rf"different modules: {message}\. Their collectives"):
        fk.audit(state, _all_batches(state)[0], _loss)


class _Leaving(Block):
    """A block that leaves out one of its parts where ``is_left`` says so."""

    part, is_left = "", staticmethod(lambda module: False)

    def forward(self, x, cos, sin, doc_ids=None, *routing):
        is_left = self.is_left(self)
        if not (is_left and self.part == "attention"):
            x = x + self.attention(self.attention_norm(x), cos, sin, doc_ids)
        if not (is_left and self.part == "feed_forward"):
            x = x + self.feed_forward(self.feed_forward_norm(x), *routing)
        return x


PARTS = {
    "cp": (2, {"cp": 2, "dp_shard": 1}, "attention"),
    "tp": (2, {"tp": 2, "dp_shard": 1}, "attention"),
    "ep": (2, {"ep": 2, "dp_shard": 2}, "feed_forward"),
    "cp, others go on": (4, {"cp": 2, "dp_shard": 2}, "attention"),
    "tp, others go on": (4, {"tp": 2, "dp_shard": 2}, "attention"),
}
"""Ranks of a layout, and a part of a block in which they meet."""
WHEN = {"in training": lambda module: module.training, "always": lambda module: True}


def _partial(part, moe=None):
    spec = fk.TransformerSpec(
        vocab_size=WORDS, dim=8, layers=2, heads=2, kv_heads=2, ffn_dim=8, max_seq_len=8, moe=moe
    )
    model = fk.Transformer(spec).double()
    block = model.layers[0]
    block.__class__, block.part = _Leaving, part
    return model, block


def _part_apart(rank, world, layout, when):
    _, sizes, part = PARTS[layout]
    moe = fk.MoESpec(experts=4, top_k=2, ffn_dim=8) if layout == "ep" else None
    model, block = _partial(part, moe)
    if rank == 1:
        block.is_left = WHEN[when]
    state = lay_out(model, sizes)
    batch = TensorDict(dict.fromkeys(("input_ids", "labels"), torch.ones(1, 8).long()), [1])
    with pytest.raises(ValueError, match=rf"ranks run different modules: .*layers\.0\.{part}"):
        fk.audit(state, batch, logits_loss)


@pytest.mark.parametrize(("layout", "when"), in_turn(list(PARTS), list(WHEN)))
def test_parts_of_a_block_that_ranks_skip_apart_are_refused(layout, when):
    run_again(_part_apart, PARTS[layout][0], layout, when)


def _some_leave(block, model, batch):
    block.is_left = lambda _: bool(batch["is_left"].any())
    return logits_loss(model, batch)


def _left_by_one_of_two():
    batches = [token_rows(2, 8, WORDS, seed) for seed in range(2)]
    for batch, is_left in zip(batches, (True, False), strict=True):
        batch["is_left"] = torch.full((2,), is_left)
    return batches


@pytest.mark.parametrize("shared", ["cp", "tp"])
@on_ranks(4, keep=True)
def test_parts_of_a_block_that_rows_decide_on_are_exact(rank, world, shared):
    """Ranks that share sequences or matrices leave them out together, others run them."""
    (alone, block), (model, own_block) = _partial("attention"), _partial("attention")
    batches, state = _left_by_one_of_two(), lay_out(model, {shared: 2, "dp_shard": 2})
    expected, _ = reference_gradients(alone, [batches], partial(_some_leave, block))
    mine = batches[fk.data_ranks(state.mesh)[0]]
    found = mean_gradients(state, [mine], partial(_some_leave, own_block))
    assert relative_error(found, expected) < 1e-10
