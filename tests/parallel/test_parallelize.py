"""One model laid out over ranks: options, precision, foreign models, compilation, errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from covering import in_turn
from lab import SPEC, full_tensors, relative_error
from pool import run_again
from torch import nn
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

IDS = torch.randint(0, SPEC.vocab_size, (4, 12), generator=torch.Generator().manual_seed(3))
LAYOUTS = [(1, {}), (2, {}), (4, {"dp_replicate": 2, "dp_shard": 2})]


@pytest.fixture
def mesh():
    yield fk.build_mesh(device="cpu")
    fk.shutdown()


class Foreign(nn.Module):
    """A model of somebody else, its layers two names down."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SPEC.vocab_size, 8)
        self.net = nn.Module()
        self.net.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8, bias=i > 0), nn.GELU()) for i in range(3))
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, SPEC.vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        return self.head(self.norm(self.net.body(self.embed(input_ids))))


def gradients(model, ids=IDS):
    """The summed loss and its full gradients."""
    loss = fk.cross_entropy(model(ids), ids.roll(-1, 1)).sum
    loss.backward()
    return loss.detach(), full_tensors(model, gradients=True)


def _laid_out(sizes, build, **options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    return fk.parallelize(build(), mesh, **options)


def _transformer():
    return fk.Transformer(SPEC)


def _foreign(device="cpu"):
    with torch.device(device):
        model = Foreign()
    if device == "cpu":
        fk.init_weights(model, 0)
    return model


def _foreign_gradients(rank, world, sizes, device, options):
    model = _laid_out(sizes, partial(_foreign, device), blocks="net.body", **options)
    assert model.head.weight is model.embed.weight
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return gradients(model, IDS.chunk(world)[rank])[1], wrapped


@pytest.mark.parametrize(
    ("layout", "device", "what"),
    in_turn(LAYOUTS, ["cpu", "meta"], ["none", "full", "selective"]),
)
def test_a_foreign_model_has_the_gradient_of_one_process(layout, device, what):
    """Parameters that modules share stay shared, on meta too and without FSDP."""
    world, sizes = layout
    expected = gradients(_foreign())[1]
    options = {"activation_checkpoint": what}
    for found, wrapped in run_again(_foreign_gradients, world, sizes, device, options):
        assert relative_error(found, expected) < 1e-6
        names = ["", "net.body.0", "net.body.1", "net.body.2"]
        assert wrapped == (names if world > 1 else [])


# Precision


def _bf16(rank, world, sizes):
    model = _laid_out(sizes, _transformer, precision="bf16")
    seen = {}
    block = model.layers[1].attention
    block.register_forward_pre_hook(lambda _, args: seen.update(enumerate(args[:3])))
    block.query.register_forward_hook(lambda m, _, out: seen.update(out=out, weight=m.weight))
    logits = model(IDS)
    fk.cross_entropy(logits, IDS.roll(-1, 1)).sum.backward()
    masters = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return {name: tensor.dtype for name, tensor in seen.items()}, masters | {logits.dtype}


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS[:2])
def test_bf16_computes_in_bfloat16_and_keeps_float32(world, sizes):
    """Masters, gradients and logits are float32, and so are the cosines and sines."""
    computed = dict.fromkeys((0, "out", "weight"), torch.bfloat16)
    angles = dict.fromkeys((1, 2), torch.float32)
    for dtypes, kept in run_again(_bf16, world, sizes):
        assert dtypes == computed | angles
        assert kept == {torch.float32}


# Recomputation and compilation


# Errors


class _WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4))


REFUSED = {
    "precision": (
        Foreign,
        {"precision": "fp8"},
        r"^precision is .fp8.; it is one of .fp32., .bf16",
    ),
    "blocks": (Foreign, {"blocks": "net.layers"}, r"'net.layers' is no list .* are \['net.body', "),
    "budget": (Foreign, {"activation_checkpoint": "budget"}, r"and compile is False; use compile"),
    "buffers": (
        _WithBuffer,
        {},
        r"^the buffers \['table'\] are on meta .*Build the model on the CP",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(mesh, case):
    build, options, message = REFUSED[case]
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=message):
        fk.parallelize(model, mesh, **options)
