"""A teacher's rows that no loss reads are refused; those that one reads train what they say."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import pytest
import torch
from lab import SPEC, alone, head_loss, lay_out, mean_gradients
from pool import run_again
from tensordict import TensorDict

import forgekit as fk

EVEN = attrs.evolve(SPEC, vocab_size=38)
UNREAD = r'has "teacher_ids", "teacher_log_probs" in its micro-batches, which the loss does not'


def rows(folder):
    """Two rows of 16 positions from a token file, in which a closing token has no teacher."""
    draw = np.random.default_rng(0)
    documents = []
    for length in (9, 14, 7):
        ids = draw.permuted(np.tile(np.arange(38), (length, 1)), axis=1)[:, :4]
        shares = draw.dirichlet(np.ones(5), length)[:, :4]
        tokens = draw.integers(1, 38, length)
        teacher = {"teacher_ids": ids, "teacher_log_probs": np.log(shares)}
        documents.append({"input_ids": tokens, **teacher})
    file = fk.write_tokens(folder, documents, vocab_size=38, eos_id=0)
    return fk.token_dataset(file, 16).__getitems__([0, 1])


def distil(model, batch):
    head = partial(
        fk.sparse_kl, ids=batch["teacher_ids"], log_probs=batch["teacher_log_probs"].double()
    )
    return model(batch["input_ids"], head=head)


def distil_by_logits(model, batch):
    """The same by the definition, over all logits in float64, by the stored numbers."""
    ids, p = batch["teacher_ids"].long(), batch["teacher_log_probs"].double().exp()
    q = model(batch["input_ids"]).softmax(-1)
    is_target = ids[..., 0] != -100
    at_ids, p = q[is_target].gather(-1, ids[is_target]), p[is_target]
    p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
    q = torch.cat([at_ids, 1 - at_ids.sum(-1, keepdim=True)], -1)
    return fk.Loss((p * (p / q).log()).sum(), is_target.sum())


def _gradients(rank, world, batch, layout):
    state = lay_out(fk.Transformer(EVEN).double(), layout)
    step = fk.make_step(distil, schedule=lambda step: 0.0, max_norm=1e9)
    here = mean_gradients(state, [batch], distil)
    state, _ = step(state, [batch])  # audited, too
    return here


def test_stored_rows_train_ranks_as_one(tmp_path):
    batch = rows(tmp_path / "a")
    expected = mean_gradients(alone(fk.Transformer(EVEN).double()), [batch], distil_by_logits)
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for layout in ({"tp": 2}, {"cp": 2}):
        for gradients in run_again(_gradients, 2, batch, layout):
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11)


def moved(model, batch):
    """Handle the rows as a loss does that moves a batch, without reading them."""
    batch = TensorDict(dict(batch.items()), batch.batch_size)
    return head_loss(model, batch)


def ids_alone(model, batch):
    loss = head_loss(model, batch)
    if "teacher_ids" not in batch:
        return loss
    hits = (batch["teacher_ids"] == batch["labels"][..., None]).sum()
    return loss.with_metrics(hits=(hits, batch["labels"].numel()))


@pytest.mark.parametrize(
    ("loss_fn", "problem"),
    [
        (head_loss, UNREAD),
        (moved, UNREAD),
        (ids_alone, r'has "teacher_log_probs" in its'),
        (distil, None),
    ],
)
def test_the_audit_refuses_what_a_loss_does_not_read(loss_fn, problem, tmp_path):
    state, batch = alone(fk.Transformer(EVEN).double()), rows(tmp_path / "a")
    step = fk.make_step(loss_fn, schedule=lambda step: 1e-2)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    if problem is None:
        state, _ = step(state, [batch])
        state, _ = step(state, [batch])
        assert type(batch["teacher_ids"]) is torch.Tensor
        return
    with pytest.raises(ValueError, match=problem) as raised:
        step(state, [batch])
    assert "forgekit.sparse_kl, or prepare the data without a teacher's rows" in str(raised.value)
    assert all(torch.equal(p, before[name]) for name, p in state.model.named_parameters())
    state, _ = step(state, [batch.exclude("teacher_ids", "teacher_log_probs")])  # of the same state
    assert state.step == 1


def _refused(rank, world, batch, layout):
    untied = attrs.evolve(EVEN, tied=False)
    state = lay_out(fk.Transformer(untied), layout)
    batches = [batch] * (2 if "pp" in layout else 1)
    step = fk.make_step(head_loss, schedule=lambda step: 1e-2)
    with pytest.raises(ValueError, match=UNREAD) as raised:
        step(state, batches)
    state, _ = fk.make_step(distil, schedule=lambda step: 1e-2)(state, batches)
    return str(raised.value), state.step


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_all_ranks_refuse_together(layout, tmp_path):
    (message, step), other = run_again(_refused, 2, rows(tmp_path / "a"), layout)
    assert other == (message, step)
    assert message.startswith("rank 1" if "pp" in layout else "rank 0")
    assert step == 1
