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


PLAIN, HALF = nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()
FROZEN = nn.Linear(2, 2).requires_grad_(False)
ROUNDED = {"stochastic_rounding": True}
SPLIT = {"roles": {"weight": "matrix"}, "split": {"q": (1,)}}
RATES = r"^decay rates are \("
REFUSED = [
    (fk.adamw, PLAIN, {"weight_decay": -0.1}, r"^weight_decay is -0\.1; it must be finite and not"),
    (fk.adamw, FROZEN, {}, r"no trainable parameter; set requires_grad on some"),
    (fk.lion, PLAIN, {"betas": (0.9, 1.0)}, RATES + r"0.9, 1.0\); each must be at least 0 and be"),
    (fk.schedule_free, PLAIN, {"betas": (-0.1, 0.9)}, RATES + r"-0.1, 0.9\)"),
    (fk.adamw, HALF, {"betas": (0.9, 1.5)} | ROUNDED, RATES + r"0.9, 1.5\)"),
    (fk.muon, PLAIN, {"momentum": 1.0}, RATES + r"1.0, 0.85\)"),
    (fk.schedule_free, PLAIN, {"betas": (0.0, 0.9)}, r"^betas\[0\] is 0; it must be above 0, or"),
    (fk.adamw, PLAIN, ROUNDED, "^stochastic_rounding=True, and .* parameters are float32"),
    (fk.muon, PLAIN, {}, r"^Linear has no attribute 'roles' .* Pass patterns of names: roles=\{"),
    (fk.muon, PLAIN, {"roles": {"weight": "matrices"}}, "^a role is 'matrices'; it must be one of"),
    (fk.muon, PLAIN, SPLIT, "of split matches no parameter"),
]


@pytest.mark.parametrize(("make", "model", "options", "message"), REFUSED)
def test_what_would_train_otherwise_or_nothing_is_refused(make, model, options, message):
    with pytest.raises(ValueError, match=message):
        make(model, **options)
