"""One model laid out over ranks: options, precision, foreign models, compilation, errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flash_kernels import flash_kernels
from lab import SPEC, full_tensors, lay_out, relative_error
from pool import run_again
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

IDS = torch.randint(0, SPEC.vocab_size, (4, 12), generator=torch.Generator().manual_seed(3))


class Foreign(nn.Module):
    """A model of somebody else: its layers two names down, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.net = nn.Embedding(SPEC.vocab_size, 8), nn.Module()
        first, second = (nn.Sequential(nn.Linear(8, 8, bias=i > 0), nn.GELU()) for i in range(2))
        self.net.body = nn.Sequential(first, second, first)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, SPEC.vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        return self.head(self.norm(self.net.body(self.embed(input_ids))))


def gradients(model, ids=IDS):
    """Full gradients of the summed loss."""
    fk.cross_entropy(model(ids), ids.roll(-1, 1)).sum.backward()
    return full_tensors(model, gradients=True)


def _foreign(device="cpu", seed=0):
    with torch.device(device):
        model = Foreign()
    if device == "cpu":
        fk.init_weights(model, seed)
        model.register_buffer("drawn_from", torch.tensor(seed))
    return model


def _foreign_gradients(rank, world, device, what):
    # A mesh that a user makes, with the one dimension that there is.
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    options = {"blocks": "net.body", "activation_checkpoint": what}
    # The seed is for what comes on meta alone; of values, rank 0's are everyone's.
    seed = 0 if device == "meta" else 99
    model = fk.parallelize(_foreign(device, seed=rank), mesh, seed=seed, **options)
    assert model.head.weight is model.embed.weight
    assert not any(model.buffers())
    wrapped = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return gradients(model, IDS.chunk(world)[rank]), wrapped


@pytest.mark.parametrize(
    ("world", "device", "what"),
    [(1, "cpu", "full"), (1, "meta", "none"), (2, "cpu", "selective"), (2, "meta", "full")],
)
def test_a_foreign_model_has_the_gradient_of_one_process(world, device, what):
    """Parameters that modules share stay shared, on meta too and without FSDP."""
    expected = gradients(_foreign())
    for found, wrapped in run_again(_foreign_gradients, world, device, what):
        assert relative_error(found, expected) < 1e-6
        names = ["", "net.body.0", "net.body.1"]
        assert wrapped == (names if world > 1 else [])


# Precision


def _bf16(rank, world):
    model = lay_out(fk.Transformer(SPEC), precision="bf16").model
    seen = {}
    block = model.layers[1].attention
    block.register_forward_pre_hook(lambda _, args: seen.update(enumerate(args[:3])))
    block.query.register_forward_hook(lambda m, _, out: seen.update(out=out, weight=m.weight))
    logits = model(IDS)
    fk.cross_entropy(logits, IDS.roll(-1, 1)).sum.backward()
    masters = {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()}
    return {name: tensor.dtype for name, tensor in seen.items()}, masters | {logits.dtype}


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_computes_in_bfloat16_and_keeps_float32(world):
    """Masters, gradients and logits are float32, and so are the cosines and sines."""
    computed = dict.fromkeys((0, "out", "weight"), torch.bfloat16)
    angles = dict.fromkeys((1, 2), torch.float32)
    for dtypes, kept in run_again(_bf16, world):
        assert dtypes == computed | angles
        assert kept == {torch.float32}


# Errors


class _WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4))


def _with_a_shared_part():
    model = Foreign()
    model.net.body[1][0].weight = model.net.body[0][0].weight
    return model


BODY = {"blocks": "net.body", "precision": "bf16"}
FLASH = {"attention": "flash", "precision": "bf16"}
REFUSED = {
    "^precision is .fp8.; it must be one of .fp32., .bf16": (Foreign, {"precision": "fp8"}),
    r"'net.layers' is not a ModuleList .* \['net.body', ": (Foreign, {"blocks": "net.layers"}),
    '.fast.; it must be one of "auto", "flash", "varlen", "fl': (Foreign, {"attention": "fast"}),
    "no module of Foreign has an 'attend' socke": (Foreign, {"attention": "sdpa"}),
    "8 divides, not of 4. For": (partial(fk.Transformer, SPEC), FLASH),
    "mlp_tiles 0 must be at least 1": (Foreign, {"mlp_tiles": 0}),
    "mlp_tiles is 2, but Foreign has no Tr": (Foreign, {"mlp_tiles": 2, "blocks": "net.body"}),
    "='budget' needs compile=True": (Foreign, {"activation_checkpoint": "budget"}),
    r"^the buffers \['table'\] are on meta .*Build the model on the CP": (_WithBuffer, {}),
    "blocks (1 and 0|0 and 1) share .*a whole": (_with_a_shared_part, BODY),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(mesh, message):
    build, options = REFUSED[message]
    with torch.device("meta"):
        model = build()
    with flash_kernels(), pytest.raises(ValueError, match=message):
        fk.parallelize(model, mesh, **options)


def test_dimensions_in_another_order_are_refused(mesh):
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("tp", "dp_shard"))
    for use in (lambda: fk.parallelize(nn.Linear(2, 2), other), lambda: fk.data_ranks(other)):
        with pytest.raises(ValueError, match=r"\['tp', 'dp_shard'\].* cp, tp, in this order"):
            use()


UNTRAINABLE = {
    "is torch.complex64 .*view_as_real": lambda: nn.Linear(4, 4, dtype=torch.complex64),
    "'0' is .* sparse=True.*sparse=False": lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True)),
}


@pytest.mark.parametrize("message", UNTRAINABLE)
def test_parameters_that_a_step_cannot_add_up_are_refused(message):
    model = UNTRAINABLE[message]()
    with pytest.raises(ValueError, match=message):
        fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
