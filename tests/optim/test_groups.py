"""Which parameters decay, by name, and the optimizer that is built over them."""

from __future__ import annotations

import attrs
import pytest
from lab import SPEC
from torch import nn

import forgekit as fk


def names_by_decay(model, weight_decay=0.3):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        group["weight_decay"]: {names[p] for p in group["params"]}
        for group in fk.optim.decay_groups(model, weight_decay)
    }


ENDS = ("query", "key", "value", "output", "gate", "up", "down")


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_decay_and_embeddings_and_norms_do_not(tied):
    """An output projection decays unless it is the embedding."""
    model = fk.Transformer(attrs.evolve(SPEC, tied=tied))
    names = {name for name, _ in model.named_parameters()}
    matrices = {name for name in names if name.split(".")[-2] in ENDS}
    assert len(matrices) == 7 * SPEC.layers + (not tied)
    assert names_by_decay(model) == {0.3: matrices, 0.0: names - matrices}


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


def test_a_negative_decay_is_refused():
    with pytest.raises(ValueError, match=r"weight_decay is -0\.1; it must be finite and not neg"):
        fk.optim.decay_groups(nn.Linear(2, 2), -0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: fk.lion(model, betas=(0.9, 1.0)),
        lambda model: fk.schedule_free(model, betas=(-0.1, 0.9)),
        lambda model: fk.adamw(model.bfloat16(), betas=(0.9, 1.5), stochastic_rounding=True),
        lambda model: fk.muon(model, momentum=1.0, roles={"weight": "matrix"}),
    ],
)
def test_a_decay_rate_that_would_silently_train_otherwise_is_refused(make):
    with pytest.raises(ValueError, match=r"^decay rates are .*; each must be at least 0 and below"):
        make(nn.Linear(2, 2))


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match="no trainable parameter; set requires_grad on some"):
        fk.adamw(nn.Linear(2, 2).requires_grad_(False))
