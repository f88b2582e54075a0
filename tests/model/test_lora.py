"""Adapters in one process: what they compute, merge into, start from and refuse."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from adapted import ADAPTED, SPEC, adapted_weights, batches_of, build, loss_fn, move
from torch import nn
from torch.func import functional_call

import forgekit as fk

KINDS = ("dense", "experts")
IDS = torch.arange(20).reshape(2, 10)


def plain(kind, dtype=torch.float64):
    return fk.Transformer(ADAPTED[kind][0], seed=0).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_weights_with_the_product_added(kind):
    model, base = build(kind), plain(kind)
    assert torch.allclose(model(IDS), base(IDS), rtol=0, atol=1e-14)  # at first it changes nothing
    weights = adapted_weights(kind, dict(move(model).named_parameters()))
    expected = functional_call(base, weights, (IDS,))
    assert torch.allclose(model(IDS), expected, rtol=0, atol=1e-12)
    # Ranks that are no multiple of what the grouped product takes.
    half = move(build(kind, torch.float32))
    assert torch.allclose(half(IDS).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", [{}, {"dora": True}, {"base": "nf4"}])
def test_no_rows_make_no_rows(adapter):
    """As an expert of a foreign model that no token chose."""
    model = fk.add_lora(nn.Sequential(nn.Linear(128, 128)), rank=2, targets="0", **adapter)
    x = torch.ones(2, 0, 128, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == x.shape
    fk.merge_lora(model)
    assert model(x).shape == x.shape


def test_initial_values_follow_seed_and_name():
    model = build("dense")
    query, key = (model.layers[0].attention.get_submodule(n).lora_A for n in ("query", "key"))
    other = model.layers[1].attention.query.lora_A
    assert not torch.equal(query[:, :8], key[:, :8])
    assert not torch.equal(query, other)
    bound = SPEC.dim**-0.5
    assert 0.9 * bound < query.abs().max() <= bound
    value = model.layers[0].attention.value
    assert torch.equal(value.lora_magnitude_vector, value.weight.norm(dim=1))
    again = fk.add_lora(plain("dense"), targets="*.query", rank=4, seed=4)
    assert not torch.equal(again.layers[0].attention.query.lora_A, query)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_adds_in_float32_and_rounds_once(kind, dtype):
    model = move(build(kind, dtype))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    unmerged, wide = model(IDS), torch.promote_types(dtype, torch.float32)
    assert unmerged.dtype == dtype
    assert {p.dtype for n, p in before.items() if "lora_" in n} == {wide}
    fk.merge_lora(model)
    merged = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, weight in adapted_weights(kind, {n: p.to(wide) for n, p in before.items()}).items():
        rounding = 1e-14 if dtype == wide else torch.finfo(dtype).eps * weight.abs() + 1e-7
        assert ((merged[name] - weight.to(dtype)).abs() <= rounding).all(), name
        assert dtype == wide or (merged[name] == weight.to(dtype)).float().mean() > 0.99
    difference = (model(IDS) - unmerged).norm() / unmerged.norm()
    assert difference < (1e-14 if dtype == wide else 0.03)
    fk.unmerge_lora(model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(model(IDS), unmerged)
    fk.merge_lora(model)
    assert all(torch.equal(p, merged[n]) for n, p in model.named_parameters())


def test_dropout_acts_in_training_alone():
    model = move(fk.add_lora(plain("dense"), targets="*.down", dropout=0.5))
    without = move(fk.add_lora(plain("dense"), targets="*.down"))
    assert not torch.equal(model(IDS), model(IDS))
    assert torch.equal(model.eval()(IDS), without.eval()(IDS))
    torch.manual_seed(0)
    x, down = torch.randn(3, 48, dtype=torch.float64), model.layers[0].feed_forward.down
    expected = without.layers[0].feed_forward.down(x)
    assert torch.equal(down(x), expected)
    mean = torch.stack([down.train()(x).detach() for _ in range(900)]).mean(0)
    assert (mean - expected).abs().mean() < 0.1 * (down(x) - expected).abs().mean()


def test_a_frozen_router_keeps_its_bias():
    moe = attrs.evolve(ADAPTED["experts"][0].moe, bias_rate=0.1, first=0)
    spec = attrs.evolve(ADAPTED["experts"][0], moe=moe)
    model = fk.add_lora(fk.Transformer(spec), targets="*.experts")
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    step(state, [row[0] for row in batches_of(1)])
    router = model.layers[0].feed_forward.router
    assert not router.selection_bias.any()
    assert router.load.std() > 0


def test_a_checkpoint_of_the_base_loads_into_a_model_with_adapters(tmp_path):
    base = fk.Transformer(SPEC, seed=1).double()
    saved = fk.TrainState.create(base, fk.adamw(base), seed=0)
    fk.checkpoint_save(saved, tmp_path, blocking=True)
    model = build("dense")
    before = model.layers[0].attention.query.lora_A.detach().clone()
    state = fk.TrainState.create(model, fk.adamw(model))
    state = fk.checkpoint_load(state, tmp_path, parts=("model",))
    assert torch.allclose(model(IDS), base(IDS), rtol=0, atol=1e-13)
    assert torch.equal(model.layers[0].attention.query.lora_A, before)
    move(model)
    fk.merge_lora(model)
    with pytest.raises(ValueError, match="a checkpoint would hold the adapters twice"):
        fk.checkpoint_save(state, tmp_path / "merged")
    with pytest.raises(ValueError, match="unmerging would bring back other weights"):
        fk.checkpoint_load(state, tmp_path)


def test_adapters_of_a_foreign_model_and_of_a_tied_one():
    torch.manual_seed(0)
    foreign = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    before = foreign(x)
    move(fk.add_lora(foreign, rank=2, alpha=8.0, targets=("0", "2"), dora=True))
    after = foreign(x)
    assert not torch.allclose(after, before)
    fk.merge_lora(foreign)
    assert torch.allclose(foreign(x), after, rtol=0, atol=1e-13)
    tied = fk.add_lora(tied_transformer(), targets=("*.query",))
    tied(IDS).square().sum().backward()
    assert tied.layers[0].attention.query.lora_B.grad.abs().max() > 0


def tied_transformer():
    return fk.Transformer(attrs.evolve(SPEC, tied=True)).double()


def tied_linears():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    model.head.weight = model.embed.weight
    return model


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def merged():
    model = move(build("dense"))
    fk.merge_lora(model)
    return model


dense, experts = partial(plain, "dense"), partial(plain, "experts")
add = fk.add_lora
REFUSED = [
    (lambda: add(dense(), targets="*.quary"), r"no linear layer .* '\*\.quary'.*\"query"),
    (lambda: add(dense(), alpha=0.0), "'alpha' must be > 0: 0.0"),
    (lambda: add(build("dense"), targets="*.query"), r"attention\.query' already has an adapter"),
    (lambda: add(build("experts"), targets="*.experts.up"), r"experts\.up' already has an adapter"),
    (lambda: add(experts(), targets="*.experts.down", dora=True), r"its adapter takes no dora"),
    (lambda: add(experts(), targets="*.experts", dropout=0.1), r"its adapter takes no dropout"),
    (lambda: add(dense(), targets="output", dropout=0.1), "'output' is .* takes no dropout"),
    (lambda: add(tied_transformer(), targets="output"), "of a tied model is its embedding"),
    (lambda: add(tied_linears(), targets="head"), r"'head' shares its weight with 'embed\.weight'"),
    (lambda: add(nn.Sequential(Doubled(3, 3)), targets="0"), "Doubled with a forward of its own"),
    (lambda: fk.merge_lora(dense()), "Transformer has no adapter to merge"),
    (lambda: fk.merge_lora(merged()), "are merged into their weights: once more would add them tw"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_no_adapter_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_layer_gives_way_to_one_with_its_parameters_and_hooks():
    model, seen = fk.Transformer(SPEC, seed=0), []
    before = model.layers[0].attention.query
    before.register_forward_hook(lambda *_: seen.append(True))
    fk.add_lora(model, targets=("layers.0.attention.query",))
    after = model.layers[0].attention.query
    assert type(before) is torch.nn.Linear
    assert dict(before.named_parameters()).keys() == {"weight"}
    assert after.weight is before.weight
    model(torch.arange(4)[None])
    assert seen == [True]
