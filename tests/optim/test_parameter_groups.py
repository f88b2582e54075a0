"""Which parameters decay, by name, and the optimizer that is built over them."""

from __future__ import annotations

import attrs
import pytest
import torch
from oracle import SPEC
from torch import nn

import forgekit as fk


def names_by_decay(model, weight_decay=0.3):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        group["weight_decay"]: {names[p] for p in group["params"]}
        for group in fk.optim.decay_groups(model, weight_decay)
    }


MATRICES = {
    f"layers.{layer}.{name}.weight"
    for layer in range(SPEC.layers)
    for name in (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "feed_forward.gate",
        "feed_forward.up",
        "feed_forward.down",
    )
}
NORMS = {"norm.weight"} | {
    f"layers.{layer}.{name}_norm.weight"
    for layer in range(SPEC.layers)
    for name in ("attention", "feed_forward", "attention.query", "attention.key")
}


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_and_embeddings_and_norms_do_not(tied):
    """An output projection decays unless it is the embedding."""
    found = names_by_decay(fk.Transformer(attrs.evolve(SPEC, tied=tied)))
    assert found == {
        0.3: MATRICES if tied else MATRICES | {"output.weight"},
        0.0: NORMS | {"embedding.weight"},
    }


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight


def test_a_foreign_model_is_split_by_the_same_rule():
    assert names_by_decay(Foreign()) == {
        0.3: {"convolution.weight"},
        0.0: {"words.weight", "convolution.bias", "norm.weight", "norm.bias", "head.bias"},
    }


def test_each_trainable_parameter_is_in_one_group_once():
    model = Foreign()
    listed = [p for group in fk.optim.decay_groups(model, 0.1) for p in group["params"]]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(listed) == len(set(listed)) == len(trainable)
    assert set(listed) == set(trainable)


def test_a_group_without_parameters_is_left_out():
    groups = fk.optim.decay_groups(nn.Linear(2, 2, bias=False), 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1]
    assert [group["weight_decay"] for group in fk.optim.decay_groups(nn.LayerNorm(2), 0.1)] == [0.0]


@pytest.mark.bad_input
@pytest.mark.parametrize("weight_decay", [-0.1, float("nan")])
def test_a_negative_decay_is_refused(weight_decay):
    with pytest.raises(
        ValueError, match=rf"weight_decay is {weight_decay}; it must be finite and not neg"
    ):
        fk.optim.decay_groups(nn.Linear(2, 2), weight_decay)


@pytest.mark.bad_input
@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_train_is_an_error(model):
    with pytest.raises(ValueError, match="no trainable parameter; set requires_grad on some"):
        fk.adamw(model)


def test_adamw_is_fused_and_takes_its_arguments():
    model = fk.Transformer(SPEC)
    optimizer = fk.adamw(model, lr=0.02, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.02, (0.8, 0.9), 1e-5)
        assert group["fused"] is True
