"""The model against a second writing of the same mathematics, in float64 and complex numbers."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from lab import SPEC, Watch, plain_attention
from torch import Tensor

import forgekit as fk
from forgekit.model import attention

IDS = torch.randint(0, SPEC.vocab_size, (2, 12), generator=torch.Generator().manual_seed(3))
DOC_IDS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [4] * 2 + [7] * 9 + [-1]])


def build(seed: int = 0, **changes) -> fk.Transformer:
    """A model in float64 with weights large enough for every part to matter."""
    model = fk.Transformer(attrs.evolve(SPEC, **changes), seed=seed).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(15 if parameter.ndim > 1 else 1)
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)) * (len(name) % 3 + 1))
    return model


# A second writing


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Channels i and i + c/2 are the parts of a complex number, which turns."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angles = positions.double()[..., None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), -1)


def reference(model: fk.Transformer, ids: Tensor, positions: Tensor, doc_ids: Tensor | None):
    spec, w = model.spec, dict(model.named_parameters())
    heads = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
    b, s = ids.shape
    x = w["embedding.weight"][ids]
    for i in range(spec.layers):
        p = f"layers.{i}.attention"
        h = _normed(x, w[f"{p}_norm.weight"], spec.norm_eps)
        q, k, v = (
            (h @ w[f"{p}.{name}.weight"].T + w.get(f"{p}.{name}.bias", 0.0)).view(b, s, n, -1)
            for name, n in heads.items()
        )
        if spec.qk_norm:
            q = _normed(q, w[f"{p}.query_norm.weight"], spec.norm_eps)
            k = _normed(k, w[f"{p}.key_norm.weight"], spec.norm_eps)
        q, k = _turned(q, positions, spec.rope_theta), _turned(k, positions, spec.rope_theta)
        x = x + plain_attention(q, k, v, doc_ids).reshape(b, s, -1) @ w[f"{p}.output.weight"].T
        p = f"layers.{i}.feed_forward"
        h = _normed(x, w[f"{p}_norm.weight"], spec.norm_eps)
        gate = h @ w[f"{p}.gate.weight"].T
        up = h @ w[f"{p}.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{p}.down.weight"].T
    x = _normed(x, w["norm.weight"], spec.norm_eps)
    return x @ w["embedding.weight" if spec.tied else "output.weight"].T


BIASED = {"qk_norm": False, "qkv_bias": True}
CHANGES = [{}, BIASED, {"tied": True}, {"rope_theta": 50.0}, {"norm_eps": 0.1}]


@pytest.mark.parametrize("call_cost", [0, 10**12], ids=["one by one", "mask"])
@pytest.mark.parametrize("doc_ids", [None, DOC_IDS], ids=["no documents", "documents"])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ", ".join(changes) or "as it is")
def test_the_model_equals_its_second_writing(monkeypatch, changes, doc_ids, call_cost):
    monkeypatch.setattr(attention, "CALL_COST", call_cost)
    model = build(**changes)
    positions = torch.stack([torch.arange(12), torch.arange(12).flip(0) * 3])
    found = model(IDS, position_ids=positions, doc_ids=doc_ids)
    expected = reference(model, IDS, positions, doc_ids)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
    parameters = list(model.parameters())
    mine = torch.autograd.grad((found * upstream).sum(), parameters)
    theirs = torch.autograd.grad((expected * upstream).sum(), parameters)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("doc_ids", [None, DOC_IDS], ids=["no documents", "documents"])
def test_a_float64_model_computes_nothing_in_less(dtype, doc_ids):
    model = build().to(dtype)
    with Watch() as seen:
        loss = fk.cross_entropy(model(IDS, doc_ids=doc_ids), IDS, z_loss=0.1)
        loss.sum.backward()
    wanted = {torch.float64} if dtype == torch.float64 else {torch.float32, torch.float64}
    assert seen.dtypes == wanted  # a float32 model has its rotary angles in float64


# Options


def test_dropout_acts_in_training_alone_and_max_seq_len_is_the_longest_that_is_accepted():
    plain, model = fk.Transformer(SPEC), fk.Transformer(attrs.evolve(SPEC, dropout=0.4))
    assert not torch.equal(model(IDS), model(IDS))
    assert torch.equal(model.eval()(IDS), plain(IDS))
    ids = torch.zeros(1, 17, dtype=torch.int64)
    assert model(ids[:, :16]).shape == (1, 16, SPEC.vocab_size)
    with pytest.raises(ValueError, match=r"input_ids has 17 positions; max_seq_len is 16"):
        model(ids)


REFUSED = {
    r"^dim 30 must be divisible by 2 \* heads = 12, so .*; the nearest are 24": {"dim": 30},
    r"^kv_heads 4 must divide heads 6; it can be one of \[1, 2, 3, 6\]\.$": {"kv_heads": 4},
    r"^head_dim 5 must be even, so that rotary .*; the nearest are 4 and 6\.$": {"head_dim": 5},
    r"^'dropout' must be < 1: 1\.0$": {"dropout": 1.0},
    r"^'rope_theta' must be > 0: nan$": {"rope_theta": math.nan},
}


@pytest.mark.parametrize("message", REFUSED)
def test_sizes_that_do_not_fit_are_refused(message):
    with pytest.raises(ValueError, match=message):
        attrs.evolve(SPEC, **REFUSED[message])
