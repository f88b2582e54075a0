"""Experts spread over ranks: the gradient, the one norm and the training of one process."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from covering import first_of
from oracle import full, full_tensors, relative_error
from ranks import run_again, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk
from forgekit.mesh import expert_ranks, expert_view
from forgekit.model.moe import dispatch_local
from forgekit.parallel.expert import apply_experts, find_experts

VOCAB, DIM, FFN, EXPERTS = 19, 8, 12, 4
PADDING = 0
PATTERN = "layers.*.routed.experts"
LAYOUTS = {
    "EP2": (2, {"ep": 2}),
    "EP2xFSDP2": (4, {"ep": 2}),
    "EP4": (4, {"ep": 4}),
    "EP2xHSDP2": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
}
KINDS = ("ragged", "idle expert", "rank without tokens", "rank without targets")
MAX_NORM = 0.05
LR = 0.01


class Experts(nn.Module):
    """Matrices of all experts, each applied to the tokens that its count gives it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, DIM, FFN))
        self.bias = nn.Parameter(torch.empty(EXPERTS, FFN))
        self.down = nn.Parameter(torch.empty(EXPERTS, FFN, DIM))

    def forward(self, tokens, counts):
        ids = torch.arange(len(counts)).repeat_interleave(counts)
        hidden = torch.einsum("md,mdf->mf", tokens, self.up[ids]) + self.bias[ids]
        return torch.einsum("mf,mfd->md", F.gelu(hidden), self.down[ids])


class Routed(nn.Module):
    """Each token to the two experts that its router prefers; padding to none.

    By place the experts take turns: rounding cannot turn a token to another one.
    """

    def __init__(self, idle, by_place):
        super().__init__()
        self.by_place = by_place
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.dispatch = dispatch_local
        self.idle = idle

    def forward(self, x, is_token):
        tokens = x[is_token]
        scores = self.router(tokens)
        if self.idle is not None:
            scores = scores.index_fill(1, torch.tensor([self.idle]), float("-inf"))
        weights, ids = scores.softmax(-1).topk(2)
        if self.by_place:
            ids = (torch.arange(len(tokens)).unsqueeze(1) + torch.arange(2)) % EXPERTS
            weights = scores.softmax(-1).gather(1, ids)
        twice = tokens.repeat_interleave(2, dim=0)
        out = self.dispatch(twice, ids.flatten(), EXPERTS, self.experts)
        mixed = (out.unflatten(0, (-1, 2)) * weights.unsqueeze(-1)).sum(1)
        return torch.zeros_like(x).index_put((is_token,), mixed)


class Layer(nn.Module):
    def __init__(self, *routing):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.routed = Routed(*routing)

    def forward(self, x, is_token):
        return x + self.routed(self.norm(x), is_token)


class Model(nn.Module):
    def __init__(self, idle=None, *, by_place=False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(idle, by_place) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def initial_std(self, name):
        return None if name.endswith("norm.weight") else 0.3

    def forward(self, input_ids):
        x, is_token = self.embed(input_ids), input_ids != PADDING
        for layer in self.layers:
            x = layer(x, is_token)
        return self.head(x)


def _model(kind):
    idle = 1 if kind == "idle expert" else None
    model = Model(idle, by_place=kind == "by place").double()
    fk.init_weights(model, 0)
    return model


def _batches(world, kind, step=0):
    """``[micro-batch][rank]`` of two rows of ragged places."""
    generator = torch.Generator().manual_seed(step)
    draw = partial(torch.randint, generator=generator)
    micro_batches = []
    for places in (5, 7):
        row = []
        for rank in range(world):
            ids = draw(1, VOCAB, (2, places))
            labels = draw(0, VOCAB, (2, places))
            labels[draw(0, 10, labels.shape) < 3 + rank] = -100
            if rank == world - 1 and kind == "rank without tokens":
                ids[:] = PADDING
            if rank == world - 1 and kind.startswith("rank without"):
                labels[:] = -100
            row.append(TensorDict({"input_ids": ids, "labels": labels}, [2]))
        micro_batches.append(row)
    return micro_batches


def _loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


# The reference


def _dense(experts, tokens, expert_ids, count, compute):
    """Every expert computes every token; no order, no counts."""
    up, bias, down = experts.up, experts.bias, experts.down
    hidden = F.gelu(torch.einsum("nd,edf->nef", tokens, up) + bias)
    out = torch.einsum("nef,efd->ned", hidden, down)
    return (out * F.one_hot(expert_ids, count).unsqueeze(-1)).sum(1)


def _reference(world, kind):
    """Gradients, norm, and parameters after a step of AdamW, in one process."""
    model = _model(kind)
    for layer in model.layers:
        layer.routed.dispatch = partial(_dense, layer.routed.experts)
    optimizer = fk.adamw(model)
    batches = [batch for row in _batches(world, kind) for batch in row]
    targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        logits = model(batch["input_ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        (loss / targets).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    for group in optimizer.param_groups:
        group["lr"] = LR
    optimizer.step()
    return gradients, norm, {n: p.detach() for n, p in model.named_parameters()}


# The layouts


def _lay_out(model, mesh, **options):
    return fk.parallelize(model, mesh, plan={PATTERN: "expert"}, **options)


def _train(rank, world, sizes, kind):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    model = _lay_out(_model(kind), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    totals = fk.accumulate(state, [row[rank] for row in _batches(world, kind)], _loss)
    totals = fk.reduce_totals(totals, state)
    gradients = {name: full(gradient) for name, gradient in fk.gradients(state, totals).items()}
    correction = fk.clip(totals, MAX_NORM)
    state = fk.update(state, correction, lr=LR, totals=totals)
    return gradients, correction.grad_norm.item(), full_tensors(state.model)


SOME = [*itertools.product(["EP2"], KINDS), ("EP2xHSDP2", "ragged"), ("EP2xFSDP2", "idle expert")]


@pytest.mark.parametrize(("layout", "kind"), first_of(SOME, itertools.product(LAYOUTS, KINDS)))
def test_experts_train_as_in_one_process(layout, kind):
    world, sizes = LAYOUTS[layout]
    gradients, norm, parameters = _reference(world, kind)
    assert norm > 2 * MAX_NORM  # so that the one factor clips
    idle = gradients["layers.0.routed.experts.up"][1].abs().max()
    assert (idle == 0) == (kind == "idle expert")
    for found, found_norm, found_parameters in run_again(_train, world, sizes, kind):
        assert relative_error(found, gradients) < 1e-10
        assert found_norm == pytest.approx(norm, rel=1e-10)
        assert relative_error(found_parameters, parameters) < 1e-10


# What lies where


def _view(rank, world, sizes):
    view = expert_view(fk.build_mesh(fk.MeshSpec(**sizes), device="cpu"))
    return dict(zip(view.mesh_dim_names, view.mesh.shape, strict=True)), view["ep"].mesh.tolist()


def test_the_view_keeps_neighbours_together():
    sizes = {"pp": 2, "dp_shard": 1, "cp": 2, "ep": 2}
    for rank, (shape, group) in enumerate(run_again(_view, 4, sizes)):
        assert shape == {"pp": 2, "dp_replicate": 1, "fsdp_ep": 1, "ep": 2, "tp": 1}
        assert group == [rank // 2 * 2, rank // 2 * 2 + 1]


# Precision


def _bf16(rank, world, sizes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    model = _lay_out(_model("by place").float(), mesh, precision="bf16")
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    sent = []
    experts = model.layers[0].routed.experts
    experts.register_forward_pre_hook(lambda _, args: sent.append(args[0].dtype))
    totals = fk.accumulate(state, [row[rank] for row in _batches(world, "by place")], _loss)
    factor = fk.clip(fk.reduce_totals(totals, state)).factor
    gradients = full_tensors(model, gradients=True)
    return sent, {n: g * factor for n, g in gradients.items()}


def test_tokens_travel_in_bfloat16():
    gradients, _, _ = _reference(2, "by place")
    for sent, found in run_again(_bf16, 2, {"ep": 2}):
        assert sent == [torch.bfloat16] * 2
        assert {g.dtype for g in found.values()} == {torch.float32}
        assert relative_error(found, gradients) < 5e-2


# The local socket


# Errors


class _Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()


class _WithRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.dispatch = dispatch_local
        self.router = nn.Linear(DIM, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, DIM, FFN))


class _Shaped(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.dispatch = dispatch_local
        self.up = nn.Parameter(torch.empty(shape))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "pattern", "message"),
    [
        (_Alone, "experts", r"neither 'experts' nor a module above it has a `dispatch` socket"),
        (
            _WithRouter,
            "",
            r"'' \(_WithRouter\) has the parameters .* and the layers \['router'\]; style 'expert' "
            r"is for a module whose parameters are all .* Keep the router outside of it",
        ),
        (partial(_Shaped, 3), "", r"has the parameters \{'up': \(3,\)\}; style 'expert' is for"),
        (
            partial(_Shaped, 5, 8, 2),
            "",
            r"'' has 5 experts, 2 to a rank, so some of the 4 ranks of ep would have none; use "
            r"ep=3\.",
        ),
        (
            Model,
            "layers.*.moe",
            r"'layers\.\*\.moe' matches no module of Model; the modules with a dispatch socket are "
            r"\['layers\.0\.routed', 'layers\.1\.routed'\]",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(build, pattern, message):
    for found in run_again(_refusal, 4, build, pattern):
        with pytest.raises(ValueError, match=message):
            raise found


def _refusal(rank, world, build, pattern):
    view = expert_view(fk.build_mesh(fk.MeshSpec(ep=4), device="cpu"))
    model = build()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (matched in the parent)
        apply_experts(model, view, find_experts(model, {pattern: "expert"}))
    return error.value


def _computed_alike(rank, world):
    view = expert_view(fk.build_mesh(fk.MeshSpec(ep=2, tp=2), device="cpu"))
    model = Model()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (matched in the parent)
        apply_experts(model, view, find_experts(model, {PATTERN: "expert"}))
    return error.value


@pytest.mark.bad_input
def test_experts_that_tensor_parallel_ranks_compute_alike_do_not_travel():
    message = (
        r"^'layers\.0\.routed\.experts' computes the same on all ranks of tp 2, so with ep 2 its "
        r"tokens would travel 2 times over\. Give the layer above it the style 'routed', or us"
    )
    for found in run_ranks(_computed_alike, 4):
        with pytest.raises(ValueError, match=message):
            raise found


def _two_meshes(rank, world):
    """Equal in torch's eyes; each knows its own experts, and a mesh by torch alone has none."""
    meshes = [fk.build_mesh(fk.MeshSpec(ep=ep), device="cpu") for ep in (2, 1, 4)]
    plain = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    assert meshes[0] == meshes[1] == meshes[2]
    return [expert_ranks(mesh) for mesh in (*meshes, plain)]


def test_meshes_of_one_shape_keep_their_own_experts():
    for rank, found in enumerate(run_ranks(_two_meshes, 4)):
        assert found == [(rank % 2, 2), (0, 1), (rank, 4), (0, 1)]


def test_a_module_inside_another_one_is_not_sharded_twice():
    model = Model()
    found = find_experts(model, {"layers.*.routed*": "expert"})
    assert found == [layer.routed for layer in model.layers]
