"""Losses of each source against torch's cross-entropy of each row, in float64, in many layouts."""

from __future__ import annotations

import math
from functools import partial

import attrs
import lab
import pytest
import torch
import torch.nn.functional as F
from covering import in_turn
from pool import run_again
from tensordict import TensorDict

import forgekit as fk

SPEC = attrs.evolve(lab.SPEC, vocab_size=36)  # which tensor parallelism can divide
SOURCES = ("code", "prose", "never")
ROWS, PLACES = 8, 8
LAYOUTS = {
    "tp2": {"dp_shard": 1, "tp": 2},
    "pp2": {"dp_shard": 1, "pp": 2},
    "dp2-cp2": {"dp_shard": 2, "cp": 2},
}


def global_batch() -> list[TensorDict]:
    """Four micro-batches of two rows, ragged, one row and one micro-batch without a target."""
    batch = lab.token_rows(ROWS, PLACES, SPEC.vocab_size)
    batch["labels"][0], batch["labels"][4:6] = -100, -100
    batch["source"] = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1])
    return list(batch.split(2))


def logits_loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"], 0.01)


def head_loss(model, batch):
    head = partial(fk.linear_cross_entropy, labels=batch["labels"], z_loss=0.01)
    return model(batch["input_ids"], head=head)


def reference() -> dict[str, tuple[float, int]]:
    """Summed loss and targets of each source."""
    model, batch = fk.Transformer(SPEC).double(), torch.cat(global_batch())
    with torch.no_grad():
        logits = model(batch["input_ids"])
    losses = F.cross_entropy(logits.mT, batch["labels"], reduction="none")
    losses += 0.01 * logits.exp().sum(-1).log().square()
    found = {}
    for index, name in enumerate(SOURCES):
        keep = (batch["labels"] != -100) & (batch["source"] == index)[:, None]
        found[name] = float(losses[keep].sum()), int(keep.sum())
    return found


def check(metrics, prefix=""):
    for name, (total, targets) in reference().items():
        assert float(metrics[f"{prefix}source/{name}/targets"]) == targets
        loss = float(metrics[f"{prefix}source/{name}/loss"])
        if targets:
            assert loss == pytest.approx(total / targets, rel=1e-12)
        else:
            assert math.isnan(loss)


def run_step(rank, world, sizes, loss_fn):
    state = lab.lay_out(fk.Transformer(SPEC).double(), sizes)
    data_rank, data_world = fk.data_ranks(state.mesh)
    by_source = fk.losses_by_source(loss_fn, SOURCES)
    mine = global_batch()[data_rank::data_world]
    check(fk.evaluate(state, mine, by_source, name="all"), "eval/all/")
    _, metrics = fk.make_step(by_source, schedule=fk.constant(1e-3))(state, mine)
    check(metrics)


@pytest.mark.parametrize(("layout", "loss_fn"), in_turn(list(LAYOUTS), [logits_loss, head_loss]))
def test_losses_and_targets_of_each_source_are_global_and_exact(layout, loss_fn):
    sizes = LAYOUTS[layout]
    run_again(run_step, math.prod(sizes.values()), sizes, loss_fn)


def test_each_mistake_is_named():
    with pytest.raises(ValueError, match=r"names must be unique; got \['a', 'a'\]"):
        fk.losses_by_source(logits_loss, ["a", "a"])
    by_source = fk.losses_by_source(lambda *_: fk.Loss(torch.zeros(()), 1), SOURCES)
    with pytest.raises(
        ValueError, match=r"the loss has no per-row values.*as forgekit.cross_entropy does"
    ):
        by_source(None, global_batch()[1])
