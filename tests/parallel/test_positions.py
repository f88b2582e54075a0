"""Under context parallelism a model that makes its own positions is refused, others are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lab import (
    full_tensors,
    is_kept,
    lay_out,
    mean_gradients,
    reference_gradients,
    relative_error,
    torch_loss,
)
from pool import run_again
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk
from forgekit.model.layers import Attention, Block

SPEC = fk.TransformerSpec(
    vocab_size=22, dim=12, layers=2, heads=2, kv_heads=2, ffn_dim=12, max_seq_len=16
)


class OwnPositions(fk.Transformer):
    """Counts what it is given, where the batch has no positions."""

    def forward(self, input_ids, position_ids=None, **options):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        return super().forward(input_ids, position_ids=position_ids, **options)


class NoPositions(fk.Transformer):
    def forward(self, input_ids, **options):
        return super().forward(input_ids, position_ids=torch.zeros_like(input_ids), **options)


class Shifting(Block):
    """Takes from the position before, too."""

    def forward(self, x, *rest):
        return super().forward(x + 0.5 * F.pad(x, (0, 0, 1, -1)), *rest)


class OwnAttention(Attention):
    """Attends by itself, within what it is given."""

    def forward(self, x, *_):
        projected = (self.query(x), self.key(x), self.value(x))
        q, k, v = (t.unflatten(-1, (-1, self.channels)).transpose(1, 2) for t in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def _build(kind):
    model = {"arange": OwnPositions, "none": NoPositions}.get(kind, fk.Transformer)(SPEC)
    if kind == "token shift":
        model.layers[1].__class__ = Shifting
    if kind == "own attention":
        model.layers[1].attention.__class__ = OwnAttention
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)
    return model


def _batch(*, given=False):
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(22, (2, 3, 16), generator=generator)
    labels[0, :5] = -100
    more = {"position_ids": torch.arange(16).expand(3, -1).clone()} if given else {}
    return TensorDict({"input_ids": ids, "labels": labels, **more}, [3])


def _state(kind, method, precision="fp32"):
    # A mesh that a user makes, with the dimensions that there are.
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    model = _build(kind).to(torch.float64 if precision == "fp32" else torch.float32)
    return lay_out(model, mesh, context_parallel=method, precision=precision)


CASES = [("arange", True, "ring"), ("none", False, "ulysses")]
"""What makes positions, whether the batch has them, and how ranks share a sequence."""
INSIDE = r"what attention 'layers\.{}\.attention' is given at a position depends on other"
WRONG = {
    "arange": (INSIDE.format(0), "ring", "fp32"),
    "token shift": (INSIDE.format(1), "ulysses", "bf16"),
    "own attention": ("what the model returns at a position depends", "ring", "fp32"),
}


def _refuse(state, message):
    before = full_tensors(state.model)
    step = fk.make_step(torch_loss, schedule=fk.constant(0.1))
    with pytest.raises(ValueError, match=message) as caught:
        step(state, [_batch()])
    assert "take positions from the batch (position_ids) or self.locate" in str(caught.value)
    assert is_kept(state.model, before)
    assert state.model.training


def _on_two_ranks(rank, world):
    for kind, (message, method, precision) in WRONG.items():
        _refuse(_state(kind, method, precision), message)
    return [
        mean_gradients(_state(kind, method), [_batch(given=given)], torch_loss)
        for kind, given, method in CASES
    ]


def test_a_model_that_makes_its_own_positions_is_refused_and_others_are_exact():
    by_rank = run_again(_on_two_ranks, 2)
    for number, (kind, given, _) in enumerate(CASES):
        expected, _ = reference_gradients(_build(kind), [[_batch(given=given)]])
        for gradients in by_rank:
            assert relative_error(gradients[number], expected) < 1e-10
