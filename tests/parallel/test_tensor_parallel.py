"""Tensor parallelism by our plan and by any other: against one process in float64, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import first_of
from lab import SPEC, Watch, full_tensors, lay_out, relative_error
from pool import run_again, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

import forgekit as fk
from forgekit.parallel.fsdp import shard
from forgekit.parallel.tensor.plan import read_plan
from forgekit.parallel.tensor.tensor_parallel import apply_plan

VOCAB, POSITIONS, WIDTH = 12, 8, 8
IDS = torch.arange(2 * POSITIONS).reshape(2, POSITIONS) * 5 % VOCAB
LABELS = (IDS + 1) % VOCAB
LABELS[0, 3:] = -100


class Mixer(nn.Module):
    """A causal mean over positions, between biased projections."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.down = nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        counts = torch.arange(1, h.shape[1] + 1, dtype=h.dtype)
        return x * self.scale + self.drop(self.down(F.gelu(h.cumsum(1) / counts[:, None])))


class Foreign(nn.Module):
    """Biases, a padding id, parameters of a module with children and in a list, tied embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=7)
        self.body = nn.ModuleList(Mixer() for _ in range(2))
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.LayerNorm(WIDTH)
        self.mixed = nn.ParameterList(torch.linspace(0.5, 1.0, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, share in zip(self.body, self.mixed, strict=True):
            x = x + share * layer(x)
        return self.head(self.last(x + self.attend(x, x, x, need_weights=False)[0]))


class Placed(nn.Module):
    """What can have its positions sharded; projected without gradients too, changed in place."""

    def __init__(self, change=torch.Tensor.mul_):
        super().__init__()
        self.change = change
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        with torch.no_grad():
            level = self.up(h).abs().amax(-1, keepdim=True) > 0
        x = x + self.drop(self.down(F.gelu(self.change(self.up(h), level).cumsum(1))))
        return self.head(self.last(x))


def mixed(h: Tensor, level: Tensor) -> Tensor:
    """What sees all channels."""
    return F.rms_norm(h * level, h.shape[-1:])


def transformer(**changes: Any) -> fk.Transformer:
    """One that four ranks can share."""
    sizes = {"vocab_size": 40, "dim": 32, "heads": 8, "kv_heads": 4, "layers": 1, **changes}
    return fk.Transformer(attrs.evolve(SPEC, **sizes))


MATRICES = {"embed": "embedding", "*.up": "colwise", "*.down": "rowwise", "head": "colwise"}
PLACED = {"[nl]*": "sequence", "drop": "sequence"}
PLACED |= {"embed": "embedding", "up": "colwise", "down": "rowwise", "head": "colwise"}
GATHERED = {"*up": "colwise_gathered", "*down": "rowwise_split"}
CASES: dict[str, tuple[Any, Any]] = {
    "tied": (Foreign, MATRICES),
    "only a matrix": (Foreign, {"body.1.up": "colwise", "body.1.down": "rowwise"}),
    "positions": (Placed, PLACED),
    "all channels between": (Foreign, {**MATRICES, **GATHERED}),
    "positions, all channels": (partial(Placed, mixed), {**PLACED, **GATHERED}),
    "our own, tied, dropout": (partial(transformer, dropout=0.3, tied=True, qk_norm=False), None),
}


def filled(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def by_torch(model: Any) -> Tensor:
    return F.cross_entropy(model(IDS).flatten(0, 1), LABELS.flatten(), reduction="sum")


def by_forgekit(model: Any) -> Tensor:
    return fk.cross_entropy(model(IDS), LABELS).sum


def by_head(model: Any) -> Tensor:
    return model(IDS, head=partial(fk.linear_cross_entropy, labels=LABELS)).sum


def gradients(model: nn.Module, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    total = loss(model)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    total.backward()
    return total.detach(), full_tensors(model, gradients=True)


def sharded(model: Any, world: int, plan: Any = None) -> Any:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    apply_plan(model, mesh, read_plan(model, world, plan))
    return model


def _gradients(rank, world, everything):
    """Of each case by two losses, with FSDP in every second case."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_shard", "tp"))
    results = {}
    for number, (case, (build, plan)) in enumerate(CASES.items()):
        for with_fsdp in (False, True) if everything else (number % 2 > 0,):
            for loss in (by_forgekit, by_head if plan is None else by_torch):
                model = filled(build)
                apply_plan(model, mesh["tp"], read_plan(model, world, plan))
                assert all(isinstance(p, DTensor) for p in model.parameters())
                if with_fsdp:
                    shard([model], list(getattr(model, "body", ())), mesh["dp_shard"], "fp32")
                with implicit_replication():
                    results[case, with_fsdp, loss.__name__] = gradients(model, loss)
                assert isinstance(model(IDS), DTensor) == (case != "only a matrix")
    return results


@pytest.mark.parametrize(("world", "everything"), first_of([(2, False)], [(2, True), (4, True)]))
def test_gradients_are_those_of_one_process(world, everything):
    expected = {case: gradients(filled(build), by_torch) for case, (build, _) in CASES.items()}
    for results in run_again(_gradients, world, everything):
        for (case, *_), (loss, found) in results.items():
            torch.testing.assert_close(loss, expected[case][0], rtol=1e-10, atol=0)
            assert relative_error(found, expected[case][1]) < 1e-10, case


def _placed(rank, world):
    """From values and from meta: what a rank holds, whole values and placements."""
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = transformer(layers=2)
        with Watch() as sent:
            sharded(model, world)
        assert not sent.collectives
        assert all(isinstance(p, DTensor) and p.is_meta == on_meta for p in model.parameters())
        if on_meta:
            model._apply(lambda t: torch.empty_like(t, device="cpu"))
            fk.init_weights(model, 0)
        values = full_tensors(model)
        for name, parameter in transformer(layers=2).named_parameters():
            assert torch.equal(values[name], parameter)
            held = model.get_parameter(name)
            is_sharded = not held.placements[0].is_replicate()
            assert is_sharded == ("norm" not in name)
            size = held.to_local().untyped_storage().nbytes() // 4
            assert size == parameter.numel() // (world if is_sharded else 1)


PRUNED = {"embedding.weight": Shard(0), "output.weight": Shard(0), "norm.weight": Replicate()}
PRUNED |= {"layers.0.attention.output.weight": Shard(1)}


def _details(rank, world):
    """What a pipeline took out stays as it was, and the plan of the whole model goes on."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = transformer(layers=2)
    styles, modules = read_plan(model, world), dict(model.named_modules())
    model.layers[1] = nn.Identity()
    apply_plan(model, mesh, styles, modules)
    assert not any(isinstance(p, DTensor) for p in modules["layers.1"].parameters())
    assert {name: model.get_parameter(name).placements[0] for name in PRUNED} == PRUNED
    # An embedding has the gradient of its own rows only.
    embedding = sharded(nn.Sequential(nn.Embedding(1000, 8)), world, {"0": "embedding"})
    with Watch() as seen:
        embedding(torch.tensor([[1, 999]])).sum().backward()
    assert seen.largest == 500 * 8
    # Dropout masks are slices of one mask.
    drop = sharded(nn.Sequential(nn.Dropout(0.5)), world, {"0": "sequence"})
    torch.manual_seed(3)
    here = drop(torch.ones(4, 8, 16))
    torch.manual_seed(3)
    assert torch.equal(here, F.dropout(torch.ones(4, 16, 16), 0.5).chunk(2, 1)[rank])
    assert torch.equal(drop.eval()(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))


@pytest.mark.parametrize("job", [_placed, _details])
def test_ranks_keep_their_part_of_what_they_hold_and_no_more(job):
    run_again(job, 2)


# Refusals: nothing is sent, so one process finds them


class Parts(nn.Module):
    """Whatever the table of refusals needs."""

    def __init__(self):
        super().__init__()
        self.bounded = nn.Embedding(12, 4, max_norm=1.0)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def with_bias_of_experts():
    model = transformer(moe=fk.MoESpec(experts=3, top_k=1, ffn_dim=8))
    model.layers[0].feed_forward.experts.register_parameter("bias", nn.Parameter(torch.ones(3, 8)))
    return model


REFUSED: list[tuple[Any, Any, str]] = [
    (Foreign, None, "^tp is 2 and Foreign has no plan of its own; set tp to 1, or pass for exa"),
    (Foreign, {"body.*.upp": "colwise"}, "matches no module; the nearest names are 'body.[01].up'"),
    (Foreign, {"last": "columns"}, "'columns'; it is one of 'colwise', .*'expert'"),
    (Parts, {"bounded": "embedding"}, "style 'embedding' is for an nn.Embedding without max_n"),
    (with_bias_of_experts, None, "style 'routed' is for .* experts that say all of their wid"),
    (Parts, {"computed": "rowwise"}, "'computed' computes its weight .* 'rowwise' cannot"),
    (Foreign, {**MATRICES, "last": "sequence"}, r"gives \['body.0', 'body.0.norm', .*\] no style"),
]


@pytest.mark.parametrize(("build", "plan", "message"), REFUSED)
def test_plans_that_do_not_fit_are_refused(build, plan, message):
    with pytest.raises(ValueError, match=message):
        read_plan(build(), 2, plan)


def _refused(rank, world):
    with torch.device(("cpu", "meta")[rank]):
        model = transformer()
    with pytest.raises(ValueError, match=r"model: .* 0 on meta .* rank 0, .* 14 on meta .* rank 1"):
        lay_out(model)
    message = r"^'embed.weight' and 'head.weight' are one parameter, but the plan shards"
    with pytest.raises(ValueError, match=message):
        sharded(Foreign(), world, {"embed": "embedding"})
    model = sharded(transformer(), world)
    message = r"^input_ids has 5 positions, not a multiple of tp 2; the nearest are 4 and 6\. Pad"
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 5, dtype=torch.int64))
    for wrong in (40, -1):
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.full((1, 4), wrong))


def test_what_shows_only_on_ranks_is_refused():
    run_ranks(_refused, 2)


def test_a_later_pattern_counts_and_a_shared_layer_has_one_style():
    styles = read_plan(Foreign(), 2, {"*.norm": "heads", "*.*": "replicate", **MATRICES})
    assert (styles["body.0.norm"], styles["body.0.up"]) == ("replicate", "colwise")
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": layer, "second": layer})
    assert read_plan(model, 2, {"second": "colwise"}) == {"first": "colwise"}
