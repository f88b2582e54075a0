"""Experts over ranks: a socket that exchanges tokens gives what one process gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lab import full_tensors, relative_error
from pool import run_again, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk
from forgekit.mesh import expert_ranks, expert_view
from forgekit.model.moe import dispatch_local
from forgekit.parallel.expert import apply_experts, find_experts

DIM, FFN, EXPERTS = 8, 12, 7
PLAN = {"*.experts": "expert"}
TOKENS = {
    "ragged": [[0, 3, 3, 5, 6, 1], [2, 0, 4]],
    "an expert without tokens": [[0, 0, 2], [2, 5]],
    "a rank without tokens": [[], [1, 4, 6]],
    "a rank whose experts get none": [[0, 1], [3, 2]],
    "tokens of no expert": [[EXPERTS, 0, EXPERTS], [6, EXPERTS]],
}
"""Experts of each rank's tokens."""


class Experts(nn.Module):
    """Matrices of all experts, each applied to the tokens that its count gives it."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, DIM, FFN))
        self.bias = nn.Parameter(torch.empty(experts, FFN))
        self.down = nn.Parameter(torch.empty(experts, FFN, DIM))

    def forward(self, tokens, counts):
        ids = torch.arange(len(counts)).repeat_interleave(counts)
        hidden = torch.einsum("md,mdf->mf", tokens[: len(ids)], self.up[ids]) + self.bias[ids]
        out = torch.einsum("mf,mfd->md", F.gelu(hidden), self.down[ids])
        return F.pad(out, (0, 0, 0, len(tokens) - len(ids)))  # those of no expert come last


class Layer(nn.Module):
    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.experts = Experts(experts)
        self.dispatch = dispatch_local

    def forward(self, tokens, ids):
        return self.dispatch(tokens, ids, EXPERTS, self.experts)


def build():
    model = nn.Sequential(Layer(), Layer()).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def expert_ids(case, world):
    return [torch.tensor(ids, dtype=torch.int64) for ids in [*TOKENS[case], [], [5]][:world]]


def run(model, ids, first):
    """What comes back for tokens, their gradients, and those of the experts."""
    tokens = torch.arange(first, first + len(ids)).double()[:, None] * torch.linspace(-1, 1, DIM)
    tokens = tokens.sin().requires_grad_()
    out = model[1](model[0](tokens, ids), ids)[ids < EXPERTS]
    out.square().sum().backward()
    return out.detach(), tokens.grad, full_tensors(model, gradients=True)


def exchange(rank, world):
    """All cases, on one model."""
    view = expert_view(fk.build_mesh(fk.MeshSpec(ep=world), device="cpu"))
    model, results = build(), {}
    apply_experts(model, view, find_experts(model, PLAN))
    for case in TOKENS:
        model.zero_grad()
        ids = expert_ids(case, world)
        results[case] = run(model, ids[rank], sum(map(len, ids[:rank])))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_come_back_from_their_experts_as_in_one_process(world):
    """Seven experts are four and three, or two on each rank and one on the last."""
    by_rank = run_again(exchange, world)
    for case in TOKENS:
        expected, slopes, gradients = run(build(), torch.cat(expert_ids(case, world)), 0)
        outs, grads, found = zip(*(results[case] for results in by_rank), strict=True)
        torch.testing.assert_close(torch.cat(outs), expected)
        torch.testing.assert_close(torch.cat(grads), slopes)
        assert max(relative_error(each, gradients) for each in found) < 1e-12


def _meshes(rank, world):
    """Equal in torch's eyes; each knows its own experts, and a mesh by torch alone has none."""
    meshes = [fk.build_mesh(fk.MeshSpec(ep=ep), device="cpu") for ep in (2, 1, 4)]
    plain = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    assert meshes[0] == meshes[1] == meshes[2]
    view = expert_view(fk.build_mesh(fk.MeshSpec(pp=2, dp_shard=1, cp=2, ep=2), device="cpu"))
    assert view.mesh_dim_names == ("pp", "dp_replicate", "fsdp_ep", "ep", "tp")
    assert view.mesh.shape == (2, 1, 1, 2, 1)
    assert view["ep"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]  # neighbours
    return [expert_ranks(mesh) for mesh in (*meshes, plain)]


def test_meshes_of_one_shape_keep_their_own_experts():
    for rank, found in enumerate(run_ranks(_meshes, 4)):
        assert found == [(rank % 2, 2), (0, 1), (rank, 4), (0, 1)]


def test_a_module_inside_another_one_is_not_sharded_twice():
    model = build()
    assert find_experts(model, {"0*": "expert", "1.*": "expert"}) == [model[0], model[1].experts]
    with pytest.raises(ValueError, match=r"'\*\.moe', of style 'expert', matches no module of Seq"):
        find_experts(model, {"*.moe": "expert"})


# Errors


class WithRouter(Layer):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)


REFUSED = [
    (Experts, {"": "expert"}, {"ep": 4}, r"neither '' nor a module above it has a `dispatch` sock"),
    (
        WithRouter,
        {"": "expert"},
        {"ep": 4},
        r"'' \(WithRouter\) has the parameters .* style 'expert' is for modules whose parameters",
    ),
    (
        lambda: Layer(5),
        {"experts": "expert"},
        {"ep": 4},
        r"'experts' has 5 experts, 2 to a rank, so some of the 4 ranks of ep .* at most ep=3\.",
    ),
    (
        build,
        PLAN,
        {"ep": 2, "tp": 2},
        r"^'0\.experts' computes the same on all ranks of tp 2, so with ep 2 its tokens would "
        r"travel 2 times over\. Give the layer above it the style 'routed'",
    ),
]


def _refused(rank, world):
    for build_model, plan, sizes, message in REFUSED:
        view = expert_view(fk.build_mesh(fk.MeshSpec(**sizes), device="cpu"))
        model = build_model()
        with pytest.raises(ValueError, match=message):
            apply_experts(model, view, find_experts(model, plan))


def test_what_cannot_be_shared_is_refused():
    run_again(_refused, 4)
