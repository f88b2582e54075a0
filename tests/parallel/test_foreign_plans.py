"""Plans for models that are not ours, and plans that cannot be: against one process in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn
from lab import SPEC, full_tensors, relative_error
from ranks import run_again, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel

import forgekit as fk
from forgekit.parallel.fsdp import shard
from forgekit.parallel.tensor.plan import read_plan
from forgekit.parallel.tensor.tensor_parallel import apply_plan

VOCAB, PLACES, WIDTH = 12, 6, 8
IDS = torch.arange(2 * PLACES).reshape(2, PLACES) * 5 % VOCAB
LABELS = (IDS + 1) % VOCAB
LABELS[0, 3:] = -100


class Mixer(nn.Module):
    """A causal mean over places, between biased projections."""

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
    """Biases, a padding id, a parameter of a module with children, and tied embeddings."""

    def __init__(self, *, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=7)
        self.body = nn.ModuleList(Mixer() for _ in range(2))
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.body:
            x = layer(x)
        return self.head(self.last(x + self.attend(x, x, x, need_weights=False)[0]))


class Spread(nn.Module):
    """What can have its places spread: nothing between norms and projections."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)).cumsum(1))))
        return self.head(self.last(x))


class Watched(Spread):
    """Another projection of the same input, without gradients, and a change in place."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        with torch.no_grad():
            level = self.up(h).abs().amax(-1, keepdim=True) > 0
        x = x + self.drop(self.down(F.gelu(self.up(h).mul_(level).cumsum(1))))
        return self.head(self.last(x))


MATRICES = {"embed": "embedding", "*.up": "colwise", "*.down": "rowwise", "head": "colwise"}
PLACED = {
    "embed": "embedding",
    "[nl]*": "sequence",
    "drop": "sequence",
    "up": "colwise",
    "down": "rowwise",
    "head": "colwise",
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (Foreign, MATRICES),
    "a later pattern counts": (Foreign, {"*.norm": "replicate", "*.*": "replicate", **MATRICES}),
    "torch's own style": (Foreign, {**MATRICES, "*.up": ColwiseParallel()}),
    "only a matrix": (Foreign, {"body.1.up": "colwise", "body.1.down": "rowwise"}),
    "places": (Spread, PLACED),
    "places, watched": (Watched, PLACED),
}


def filled(build: Any, seed: int = 0) -> nn.Module:
    model = build().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():  # biases too
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tensor_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def gradients(model: nn.Module, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    logits = model(IDS)
    total = loss(getattr(logits, "logits", logits))
    total = total.full_tensor() if isinstance(total, DTensor) else total
    total.backward()
    return total.detach(), full_tensors(model, gradients=True)


def by_torch(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")


def by_forgekit(logits: Tensor) -> Tensor:
    return fk.cross_entropy(logits, LABELS).sum


def _foreign(rank, world, case, with_fsdp):
    build, plan = CASES[case]
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_shard", "tp"))
    results = []
    for loss in (by_forgekit, by_torch):
        torch.manual_seed(0)
        model = filled(build)
        apply_plan(model, mesh["tp"], read_plan(model, world, plan))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        if with_fsdp:
            shard([model], list(getattr(model, "body", ())), mesh["dp_shard"], "fp32")
        with implicit_replication():
            results.append(gradients(model, loss))
        logits = model(IDS)
        assert isinstance(logits, DTensor) == (case != "only a matrix")
    return results


@pytest.mark.parametrize(("case", "with_fsdp"), in_turn(list(CASES), [False, True]))
def test_a_foreign_model_has_the_gradients_of_one_process(case, with_fsdp):
    torch.manual_seed(0)
    expected_loss, expected = gradients(filled(CASES[case][0]), by_torch)
    for results in run_again(_foreign, 2, case, with_fsdp):
        for loss, found in results:
            torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=0)
            assert relative_error(found, expected) < 1e-10


# Refusals: nothing is sent, so one process finds them


class Norms(nn.Module):
    """Whatever the table of refusals needs."""

    def __init__(self, heads: int = 6, kv_heads: int = 2):
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(24, 4 * heads)
        self.k_proj = nn.Linear(24, 4 * kv_heads)
        self.bounded = nn.Embedding(12, 4, max_norm=1.0)
        self.narrow = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 10))


def transformer(**sizes: Any) -> fk.Transformer:
    return fk.Transformer(attrs.evolve(SPEC, **sizes))


def with_experts(**changes):
    moe = fk.MoESpec(**{"experts": 3, "top_k": 1, "ffn_dim": 8, "first": 1, **changes})
    sizes = {"dim": 8, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 8, "max_seq_len": 4}
    return fk.Transformer(fk.TransformerSpec(vocab_size=8, moe=moe, **sizes))


def with_bias_of_experts():
    model = with_experts()
    experts = model.layers[1].feed_forward.experts
    experts.register_parameter("bias", nn.Parameter(torch.ones(3, 8)))
    return model


REFUSED: list[tuple[Any, int, Any, str]] = [
    (
        Foreign,
        2,
        None,
        r"^tp is 2 and Foreign has no plan of its own; pass plan=, for example "
        r"plan=\{\"embed\": \"embedding\", .*set tp to 1\.$",
    ),
    (
        Foreign,
        2,
        {"body.*.upp": "colwise"},
        r"^the plan's pattern 'body.\*.upp' matches no module; the nearest names are 'body.\d.up', "
        r".*leave it out\.$",
    ),
    (
        Foreign,
        2,
        {"body.*.up": "columns"},
        r"^the plan gives 'body.\*.up' the style 'columns'; it is one of 'colwise', 'rowwise', 'emb"
        r"edding', 'sequence', 'heads', 'channels', 'replicate', 'routed', 'grouped', 'expert', or "
        r"a ParallelStyle of torch\.$",
    ),
    (Foreign, 2, {"last": "colwise"}, r"^style 'colwise' is for nn.Linear; 'last' is LayerNorm\("),
    (
        Norms,
        2,
        {"bounded": "embedding"},
        r"^style 'embedding' is for an nn.Embedding without max_norm, .*; 'bounded' is Embedding\("
        r"12, 4, max_norm=1.0\)\. Narrow the pattern or choose another style\.$",
    ),
    (Foreign, 2, {"body.0": "heads"}, r"^style 'heads' is for norms of a head's channels and act"),
    (
        Foreign,
        2,
        {**MATRICES, "last": "sequence"},
        r"^the plan shards positions \('sequence'\) and gives \['body.0', 'body.0.norm', .*\] no "
        r"style; .*'replicate' for what sees all positions\.$",
    ),
    (
        Norms,
        2,
        {"narrow.0": "colwise"},
        r"^out_features of 'narrow.0' is 7, which tp 2 must divide; the nearest are 6 and 8\. "
        r"Change it, or tp to one of \[1, 7\]\.$",
    ),
    (
        Norms,
        4,
        {"?_proj": "colwise"},
        r"^the heads of '' \(q_proj 6, k_proj 2; 4 channels each\) must be divisible by tp 4, key "
        r"and value heads too\. Change their numbers, or tp to one of \[1, 2\]\.$",
    ),
    (
        with_bias_of_experts,
        2,
        None,
        r"^'layers\.1\.feed_forward\.experts\.bias' cannot be tensor-parallel: experts say the "
        r'widths of "gate", "up", "down" only\. Add its own, None if every rank needs it whole, or',
    ),
]


@pytest.mark.parametrize(("build", "size", "plan", "message"), REFUSED)
def test_plans_that_do_not_fit_are_refused(build, size, plan, message):
    model = build()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        read_plan(model, size, plan)
    assert all(p is before[name] for name, p in model.named_parameters())


def _refused(rank, world):
    mesh = tensor_mesh(world)
    message = (
        r"^'embed.weight' and 'head.weight' are one parameter and the plan shards them differently "
        r"\(Shard\(dim=0\), Replicate\(\)\)\. Give both styles that shard alike, as 'embedding' and"
    )
    with pytest.raises(ValueError, match=message):
        apply_plan(tied := Foreign(), mesh, read_plan(tied, world, {"embed": "embedding"}))
    model = transformer(vocab_size=40)
    apply_plan(model, mesh, read_plan(model, world))
    message = (
        r"^input_ids has 5 positions, which tp 2 must divide; the nearest are 4 and 6\. Pad them"
    )
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(1, 5, dtype=torch.int64))
    for wrong in (40, -1):
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.full((1, 4), wrong))


def test_what_shows_only_on_ranks_is_refused():
    run_ranks(_refused, 2)


PRUNED = {
    "embedding.weight": Shard(0),
    "layers.0.attention.output.weight": Shard(1),
    "norm.weight": Replicate(),
    "output.weight": Shard(0),
}


def _pruned(rank, world):
    """What a pipeline took out stays as it was, and the plan of the whole model goes on."""
    model = transformer(vocab_size=40)
    styles, modules = read_plan(model, world), dict(model.named_modules())
    taken = modules["layers.1"]
    model.layers[1] = nn.Identity()
    apply_plan(model, tensor_mesh(world), styles, modules)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert not any(isinstance(p, DTensor) for p in taken.parameters())
    return [model.get_parameter(name).placements[0] for name in PRUNED]


def test_a_pruned_model_keeps_the_plan_of_the_whole_one():
    assert run_again(_pruned, 2) == [list(PRUNED.values())] * 2


def test_a_shared_layer_has_one_style():
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": layer, "second": layer})
    assert read_plan(model, 2, {"second": "colwise"}) == {"first": "colwise"}
