"""Rows of padding are in no softmax, those of new tokens start at the mean: as in transformers."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import some_of
from huggingface_models import load, make_model, some_ids
from lab import Watch, full, lay_out, mean_gradients
from pool import run_again
from tensordict import TensorDict

import forgekit as fk

VOCAB = 31
IDS = some_ids(shape=(2, 25))
X, LABELS = IDS[:, :-1], IDS[:, 1:].clone()
LABELS[0, 3:9] = -100


def save(folder, tied):
    """A model of transformers in float64, whose logits lie far below those of rows of zeros."""
    theirs = make_model("Llama tied" if tied else "Llama", torch.float64)
    if not tied:
        with torch.no_grad():
            theirs.model.norm.weight[0] = 9.0
            theirs.model.embed_tokens.weight[:, 0] += 2.0
            theirs.lm_head.weight[:, 0] -= 1.0
    theirs.save_pretrained(folder)
    return theirs


def reference(theirs):
    """Loss, log-probabilities, entropies and gradients of transformers, by our names."""
    logits = theirs(X).logits
    loss = F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum")
    loss.backward()
    likely = (logits / 0.7).log_softmax(-1)
    mask = LABELS == -100
    at_labels = likely.gather(-1, LABELS.clamp(min=0)[..., None])[..., 0].masked_fill(mask, 0)
    entropies = -(likely.exp() * likely).sum(-1).masked_fill(mask, 0)
    gradients = {"embedding.weight": theirs.model.embed_tokens.weight.grad}
    if not theirs.config.tie_word_embeddings:
        gradients["output.weight"] = theirs.lm_head.weight.grad
    return loss.detach(), at_labels.detach(), entropies.detach(), gradients, logits.detach()


def own_head(hidden, weight, labels=LABELS):
    """A loss as a user writes it."""
    logits = full(hidden) @ full(weight).T
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fk.Loss(total, (labels != -100).sum())


def log_probs_head(hidden, weight, labels, vocab_size=None):
    likely = fk.linear_log_probs(hidden, weight, labels, vocab_size=vocab_size)
    return fk.Loss(-likely.sum(), (labels != -100).sum())


HEADS = {
    "logits": None,
    "linear_cross_entropy": partial(fk.linear_cross_entropy, labels=LABELS),
    "linear_log_probs": partial(log_probs_head, labels=LABELS),
    "own": own_head,
}


def loss_of(name, model):
    if name == "logits":
        return fk.cross_entropy(model(X), LABELS)
    return model(X, head=HEADS[name])


@pytest.mark.parametrize(("tied", "size"), [(False, 64), (True, 32)])
def test_rows_of_padding_are_in_no_softmax(tmp_path, tied, size):
    theirs = save(tmp_path, tied)
    loss, at_labels, entropies, gradients, logits = reference(theirs)
    spec = attrs.evolve(fk.huggingface_spec(tmp_path), vocab_size=size)
    model = fk.Transformer(spec).double().eval()
    fk.load_huggingface(model, tmp_path)
    # transformers turns in float32
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    close(model(X).detach(), logits)
    for name in HEADS:
        model.zero_grad()
        mine = loss_of(name, model)
        close(mine.sum.detach(), loss)
        mine.sum.backward()
        for parameter, expected in gradients.items():
            gradient = model.get_parameter(parameter).grad
            close(gradient[:VOCAB], expected)
            assert not gradient[VOCAB:].any()
    head = partial(fk.linear_log_probs, labels=LABELS, temperature=0.7, entropy=True)
    for found, expected in zip(model(X, head=head), (at_labels, entropies), strict=True):
        close(found.detach(), expected)
    for label in (VOCAB, 63):
        outside = LABELS.clone()
        outside[1, 2] = label
        for head in (fk.linear_cross_entropy, log_probs_head, own_head):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                model(X, head=partial(head, labels=outside))
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            fk.cross_entropy(model(X), outside)


def test_without_padding_nothing_more_is_computed(tmp_path):
    save(tmp_path, tied=True)
    by_hand = attrs.evolve(fk.huggingface_spec(tmp_path), unpadded_vocab_size=None)
    wider = attrs.evolve(by_hand, vocab_size=40)
    cut = attrs.evolve(wider, unpadded_vocab_size=VOCAB)
    for name in HEADS:
        operations = []
        for spec in (by_hand, fk.huggingface_spec(tmp_path), cut):
            model = fk.Transformer(spec)
            with Watch() as watch:
                loss_of(name, model).sum.backward()
            operations.append(sorted(watch.operations))
        assert operations[0] == operations[1]
        assert len(operations[2]) - len(operations[0]) <= 3  # the slice, its gradient, the sum
    with pytest.raises(ValueError, match=r"^unpadded_vocab_size 41 is above vocab_size 40, "):
        attrs.evolve(wider, unpadded_vocab_size=41)


def _laid_out(rank, world, folder, sizes, size, new):
    spec = fk.huggingface_spec(folder)
    spec = attrs.evolve(spec, vocab_size=size, unpadded_vocab_size=VOCAB + new)
    with torch.device("meta"):
        model = fk.Transformer(spec).double()
    state = lay_out(model, sizes)
    fk.load_huggingface(state.model, folder)
    rows = {n: full(p).detach() for n, p in state.model.named_parameters() if p.shape[0] == size}
    batches = [TensorDict({"input_ids": X, "labels": LABELS}, [2]) for _ in range(2)]  # one a stage
    results = {}
    for name in () if new else HEADS:
        found = mean_gradients(state, batches, lambda m, b, name=name: loss_of(name, m))
        results[name] = {n: g for n, g in found.items() if n in rows}
    if "pp" not in sizes and not new:
        results["texts"] = fk.generate(state.model, X[:, :2], max_new_tokens=12, temperature=9.0)
    return rows, results


LAYOUTS = {
    "fsdp2": ({"dp_shard": 2}, 33, False),
    "tp2, tied, one rank of padding alone": ({"tp": 2, "dp_shard": 1}, 64, True),
    "pp2": ({"pp": 2, "dp_shard": 1}, 33, False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_in_no_softmax_of_any_layout(layout, tmp_path):
    sizes, size, tied = LAYOUTS[layout]
    theirs = save(tmp_path, tied)
    *_, gradients, _ = reference(theirs)
    targets = (LABELS != -100).sum()
    texts = fk.generate(load(tmp_path).double(), X[:, :2], max_new_tokens=12, temperature=9.0)
    for _, results in run_again(_laid_out, 2, tmp_path, sizes, size, 0):
        assert torch.equal(results.pop("texts", texts), texts)
        for found in results.values():
            assert found
            for name, gradient in found.items():
                mean, close = gradients[name] / targets, torch.testing.assert_close
                close(gradient[:VOCAB], mean, rtol=1e-5, atol=1e-6)
                assert not gradient[VOCAB:].any()


NEW = {
    "alone": ({}, 1, False),
    "fsdp2": ({"dp_shard": 2}, 2, False),
    "tp2": ({"tp": 2, "dp_shard": 1}, 2, True),
    "pp2": ({"pp": 2, "dp_shard": 1}, 2, False),
}


@pytest.mark.parametrize("layout", some_of(NEW, "fsdp2"))
def test_new_tokens_start_at_the_mean_and_padding_at_zero(layout, tmp_path, monkeypatch):
    monkeypatch.setattr("forgekit.huggingface.load.ROWS", 7)
    sizes, world, tied = NEW[layout]
    theirs = save(tmp_path, tied)
    tables = {"embedding.weight": theirs.model.embed_tokens.weight.detach()}
    if not tied:
        tables["output.weight"] = theirs.lm_head.weight.detach()
    less = attrs.evolve(fk.huggingface_spec(tmp_path), vocab_size=64, unpadded_vocab_size=30)
    with pytest.raises(fk.CheckpointError, match=r"vocab_size 31 there and 30 here"):
        fk.load_huggingface(fk.Transformer(less), tmp_path)
    seen = set()
    for rows, _ in run_again(_laid_out, world, tmp_path, sizes, 64, 3):
        for name, values in rows.items():
            seen.add(name)
            expected = torch.cat([tables[name], tables[name].mean(0).expand(3, -1)])
            torch.testing.assert_close(values[:34], expected, rtol=1e-12, atol=0)
            assert not values[34:].any()
    assert seen == tables.keys()


def test_a_checkpoint_says_which_rows_are_tokens(tmp_path):
    sizes = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "max_seq_len": 32}
    spec = fk.TransformerSpec(vocab_size=40, unpadded_vocab_size=33, **sizes)

    def state(**changes):
        model = fk.Transformer(attrs.evolve(spec, **changes))
        return fk.TrainState.create(model, fk.adamw(model))

    fk.checkpoint_save(fk.donate(state(), step=1), tmp_path, blocking=True)
    assert fk.checkpoint_load(state(), tmp_path).step == 1
    for count in (34, None):
        with pytest.raises(fk.CheckpointError, match=r"is of another model: .*unpadded_vocab_size"):
            fk.checkpoint_load(state(unpadded_vocab_size=count), tmp_path)
    whole = fk.donate(state(unpadded_vocab_size=None), step=2)  # every row is a token
    fk.checkpoint_save(whole, tmp_path / "whole", blocking=True)
    assert fk.checkpoint_load(state(unpadded_vocab_size=40), tmp_path / "whole").step == 2
    with pytest.raises(fk.CheckpointError, match=r"is of another model: .*unpadded_vocab_size"):
        fk.checkpoint_load(state(), tmp_path / "whole")
