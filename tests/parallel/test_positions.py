"""Under context parallelism a model that makes its own positions is refused, others are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lab import full_tensors, is_kept, mean_gradients, reference_gradients, relative_error
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk
from forgekit.model.attention import attend_causal
from forgekit.model.transformer import locate_all

VOCAB, DIM, HEADS, LONGEST = 22, 12, 2, 16


def _shift(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class _Attention(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attend = attend_causal
        self.own = own

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.qkv(x).chunk(3, -1))
        if self.own:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            mixed = self.attend(q, k, v, doc_ids=None)
        return self.out(mixed.flatten(2))


class _Block(nn.Module):
    def __init__(self, kind, index):
        super().__init__()
        self.kind = kind if index else "plain"
        self.attention = _Attention(own=kind == "own attention" and index == 1)
        self.feed = nn.Linear(DIM, DIM)

    def forward(self, x):
        if self.kind == "token shift":
            x = x + 0.5 * _shift(x)
        x = x + self.attention(x)
        return x + self.feed(x).tanh()


class _Model(nn.Module):
    """Learned positions, from one source or another."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(4)
        self.kind = kind
        self.embedding, self.place = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)
        self.layers = nn.ModuleList([_Block(kind, index) for index in range(2)])
        self.output = nn.Linear(DIM, VOCAB)
        if kind != "arange":
            self.locate = locate_all

    def forward(self, input_ids, position_ids=None):
        x = self.embedding(input_ids)
        if position_ids is None and self.kind == "arange":
            position_ids = torch.arange(input_ids.shape[1])
        elif position_ids is None and self.kind != "none":
            position_ids = self.locate(input_ids.shape[1], input_ids.device)
        if position_ids is not None:
            x = x + self.place(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def _loss(model, batch):
    positions = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    return fk.cross_entropy(model(batch["input_ids"], **positions), batch["labels"])


def _batch(*, given=False):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (3, LONGEST), generator=generator)
    labels = torch.randint(VOCAB, (3, LONGEST), generator=generator)
    labels[0, :5] = -100
    items = {"input_ids": ids, "labels": labels}
    if given:
        items["position_ids"] = torch.arange(LONGEST).expand(3, -1).clone()
    return TensorDict(items, [3])


def _state(kind, method, precision="fp32", pp=1):
    # A mesh that a user makes, with the dimensions that there are.
    sizes = {**({"pp": pp} if pp > 1 else {}), "dp_replicate": 1, "dp_shard": 1, "cp": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = _Model(kind)
    model = model.double() if precision == "fp32" else model
    model = fk.parallelize(model, mesh, context_parallel=method, precision=precision)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh)


CASES = [
    ("locate", False, "ring"),
    ("locate", True, "ulysses"),
    ("arange", True, "ring"),
    ("none", False, "ulysses"),
]
"""What makes positions, whether the batch has them, and how ranks share a sequence."""
INSIDE = r"what attention 'layers\.{}\.attention' is given at a position depends on other"
WRONG = {
    "arange": (INSIDE.format(0), "ring", "fp32"),
    "token shift": (INSIDE.format(1), "ulysses", "bf16"),
    "own attention": ("what the model returns at a position depends", "ring", "fp32"),
}


def _refuse(state, message, micros=1):
    before = full_tensors(state.model)
    step = fk.make_step(_loss, schedule=fk.constant(0.1))
    with pytest.raises(ValueError, match=message) as caught:
        step(state, [_batch()] * micros)
    assert "take positions from the batch (position_ids) or a socket" in str(caught.value)
    assert is_kept(state.model, before)
    assert state.model.training


def _on_two_ranks(rank, world):
    for kind, (message, method, precision) in WRONG.items():
        _refuse(_state(kind, method, precision), message)
    return [
        mean_gradients(_state(kind, method), [_batch(given=given)], _loss)
        for kind, given, method in CASES
    ]


def test_a_model_that_makes_its_own_positions_is_refused_and_others_are_exact():
    by_rank = run_again(_on_two_ranks, 2)
    for number, (kind, given, _) in enumerate(CASES):
        expected, _ = reference_gradients(_Model(kind), [[_batch(given=given)]], _loss)
        used = [name for name in expected if kind != "none" or not name.startswith("place")]
        for found in [gradients[number] for gradients in by_rank]:
            assert relative_error({name: found[name] for name in expected}, expected) < 1e-10
            assert all(found[name].any() for name in used)


def _in_stages(rank, world):
    _refuse(_state("arange", "ring", pp=2), WRONG["arange"][0], micros=2)


def test_stages_without_positions_are_refused():
    run_ranks(_in_stages, 4)
