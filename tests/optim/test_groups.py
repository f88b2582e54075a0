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


REFUSED = {
    r"^weight_decay is -0\.1; it must be finite and not neg": lambda m: fk.adamw(
        m, weight_decay=-0.1
    ),
    r"no trainable parameter; set requires_grad on some": lambda m: fk.adamw(
        m.requires_grad_(False)
    ),
    r"^decay rates are \(0.9, 1.0\); each must be at least 0 and below": lambda m: fk.lion(
        m, betas=(0.9, 1.0)
    ),
    r"^decay rates are \(-0.1, 0.9\)": lambda m: fk.schedule_free(m, betas=(-0.1, 0.9)),
    r"^decay rates are \(0.9, 1.5\)": lambda m: fk.adamw(
        m.bfloat16(), betas=(0.9, 1.5), stochastic_rounding=True
    ),
    r"^decay rates are \(1.0, 0.85\)": lambda m: fk.muon(m, momentum=1.0),
    r"^betas\[0\] is 0; it must be above 0, or no average": lambda m: fk.schedule_free(
        m, betas=(0.0, 0.9)
    ),
    r"^stochastic_rounding=True, and the trainable parameters are float32": lambda m: fk.adamw(
        m, stochastic_rounding=True
    ),
    r"^Linear has no attribute 'roles' .* Pass patterns of names: roles=\{": fk.muon,
    "^a role is 'matrices'; it must be one of": lambda m: fk.muon(m, roles={"weight": "matrices"}),
    "of split matches no parameter": lambda m: fk.muon(
        m, roles={"weight": "matrix"}, split={"q": (1,)}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_train_otherwise_or_nothing_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](nn.Linear(2, 2))
