"""Evaluation is the mean over all targets, in any split and on any number of ranks."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from covering import first_of
from lab import (
    SPEC,
    alone,
    build_state,
    count_tensors,
    full_tensors,
    global_batch,
    head_loss,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again
from saved import assert_same
from tensordict import TensorDict

import forgekit as fk


def held_out():
    """Nine rows of ragged targets, one row without any."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, SPEC.vocab_size, (9, 13), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(9):
        labels[row, row + 2 :] = -100
    labels[4] = -100
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [9])


def by_hand(batch):
    """Each row by itself, in float64: mean over the targets, its exponential, their number."""
    model, losses = fk.Transformer(SPEC).double().eval(), []
    for row in batch:
        log_p = model(row["input_ids"][None])[0].log_softmax(-1)
        losses += [-log_p[i, y].item() for i, y in enumerate(row["labels"].tolist()) if y >= 0]
    loss = sum(losses) / len(losses)
    return {"loss": loss, "perplexity": math.exp(loss), "targets": len(losses)}


def dropout_state():
    return alone(fk.Transformer(attrs.evolve(SPEC, dropout=0.5)))


@pytest.mark.parametrize(("split", "loss_fn"), [([1] * 9, head_loss), ([3, 2, 4], logits_loss)])
def test_the_mean_is_over_targets_whatever_the_split(split, loss_fn):
    """Without dropout, and with a micro-batch that has no target."""
    found = fk.evaluate(dropout_state(), iter(held_out().split(split)), loss_fn)
    numbers = {name: value.item() for name, value in found.items()}
    assert numbers == pytest.approx(by_hand(held_out()), rel=1e-6)
    assert {value.dtype for value in found.values()} == {torch.float64}


def test_a_model_alone_is_measured_and_the_result_shows_its_numbers():
    """As ``load_run`` returns one: some of it frozen, in evaluation mode."""
    model = fk.Transformer(attrs.evolve(SPEC, dropout=0.5)).eval()
    model.requires_grad_(False)
    found = fk.evaluate(model, held_out().split(4), logits_loss)
    shown = ", ".join(f"{name} {number:.6g}" for name, number in by_hand(held_out()).items())
    assert repr(found) == shown
    assert not model.training


def test_numbers_of_many_micro_batches_are_not_kept():
    """On a CPU each would stay in the midst of the memory that its logits had."""
    counts, rows = [], [*held_out().split(1)] * 50

    def counting():
        for number, row in enumerate(rows):
            if number in (100, 420):
                counts.append(count_tensors())
            yield row

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        return loss.with_metrics(twice=(2 * loss.sum, loss.count), one=(1.0, 1))

    found = fk.evaluate(dropout_state(), counting(), loss_fn)
    numbers = by_hand(held_out())
    numbers |= {"targets": 50 * numbers["targets"], "twice": 2 * numbers["loss"], "one": 1.0}
    assert {name: found[name].item() for name in numbers} == pytest.approx(numbers, rel=1e-6)
    assert counts[1] - counts[0] < 100


def _on_ranks(rank, world, layout, options):
    rows = held_out()
    empty = rows[4:5]
    mine = [rows[i : i + 1] if i < 9 else empty for i in range(rank, 12, world)]
    sets, sizes = {"set": mine, "first": mine[:1]}, {"set": 4.0}
    state = build_state(layout, world, **options)
    found = fk.evaluate(state, sets, logits_loss, bytes_per_token=sizes)
    return {name: value.item() for name, value in found.items()}


RANKS = [(2, {}, {"activation_checkpoint": "full"}), (4, {"dp_replicate": 2, "dp_shard": 2}, {})]


@pytest.mark.parametrize(("world", "layout", "options"), first_of(RANKS[:1], RANKS))
def test_ranks_agree_with_one_process(world, layout, options):
    expected = {}
    for name, rows in (("set", held_out()), ("first", held_out()[:world])):
        expected |= {f"eval/{name}/{key}": number for key, number in by_hand(rows).items()}
    expected["eval/set/bits_per_byte"] = expected["eval/set/loss"] / math.log(2) / 4
    for found in run_again(_on_ranks, world, layout, options):
        assert found == pytest.approx(expected, rel=1e-6)


def own_loss(model, batch, **fields):
    """The same sums, as a user writes them."""
    loss = logits_loss(model, batch)
    return fk.Loss(loss.sum, loss.count, **fields)


def mixed(model, batch):
    """A likelihood in the last micro-batch alone."""
    return (own_loss if len(batch) == 5 else logits_loss)(model, batch)


def balanced(model, batch):
    return logits_loss(model, batch).with_mean(torch.tensor(2.0), weight=0.5)


def head_with_z_loss(model, batch):
    head = partial(fk.linear_cross_entropy, labels=batch["labels"], z_loss=1e-3)
    return model(batch["input_ids"], head=head)


def with_accuracy(loss_fn, model, batch):
    return loss_fn(model, batch).with_metrics(accuracy=(torch.tensor(2.0), 5))


LIKELIHOODS = {
    "with a metric": (partial(with_accuracy, head_loss), True),
    "by source": (fk.losses_by_source(logits_loss, ("a",)), True),
    "of a user, who says so": (partial(own_loss, is_nll=True), True),
    "of a user": (own_loss, False),
    "in one micro-batch alone": (mixed, False),
    "a term beside it": (balanced, False),
    "a z-loss in the head": (head_with_z_loss, False),
}


@pytest.mark.parametrize("case", LIKELIHOODS)
def test_perplexity_and_bits_are_those_of_a_likelihood(case, tmp_path):
    """The exponential of another loss would mean nothing."""
    loss_fn, is_likelihood = LIKELIHOODS[case]
    batch = held_out()
    batch["source"] = torch.zeros(9, dtype=torch.long)
    rows, loss = SizedRows(batch.split([5, 4])), by_hand(held_out())["loss"]
    found = fk.evaluate(dropout_state(), rows, loss_fn)
    found = {name: value.item() for name, value in found.items()}
    assert case != "with a metric" or found["accuracy"] == pytest.approx(2 / 5)
    sizes = {"perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / 4}
    likelihood = {name: found[name] for name in sizes if name in found}
    assert likelihood == pytest.approx(sizes if is_likelihood else {}, rel=1e-6)
    told = fk.evaluate(dropout_state(), rows, loss_fn, bytes_per_token=8.0)
    assert told["bits_per_byte"].item() == pytest.approx(found["loss"] / math.log(2) / 8)


class SizedRows(list):
    """Micro-batches of a set that knows the bytes of its text."""

    dataset = SimpleNamespace(bytes_per_token=4.0)


def _perplexity(rank, world):
    rows, state = global_batch(1)[0] * 2, build_state({"pp": 2}, world)
    found, other = (fk.evaluate(state, rows, loss_fn) for loss_fn in (head_loss, own_loss))
    torch.testing.assert_close(found["perplexity"], found["loss"].exp(), rtol=1e-12, atol=0)
    assert other.keys() == {"loss", "targets"}


def test_stages_without_a_loss_know_its_perplexity_too():
    run_again(_perplexity, 2)


def rows_of(folder, *, vocab_size=SPEC.vocab_size):
    """Held-out rows of a token file of its own ids, made by a tokenizer of that name."""
    ids = torch.arange(40) * 7 % vocab_size
    fk.write_tokens(folder, [ids.numpy()], vocab_size=vocab_size, eos_id=0)
    (folder / "tokenizer.json").write_text(folder.name)
    return SimpleNamespace(dataset=fk.token_dataset(folder, 8))


def test_a_set_that_the_model_cannot_be_measured_on_is_named(tmp_path):
    wide, (a, b) = rows_of(tmp_path / "wide", vocab_size=50), (rows_of(tmp_path / n) for n in "ab")
    fk.write_tokens(tmp_path / "a" / "heldout", [[1, 2, 3]], vocab_size=37, eos_id=0)
    state, data = dropout_state(), a.dataset
    own = fk.held_out_loader(state, data.held_out(), 2)
    fk.evaluate(state, {"own": own}, logits_loss, trained_on=data)
    for message, sets, trained_on in [
        (r"^set 'w' \(.*/wide\) has a vocabulary of 50, the model one of 37", {"w": wide}, None),
        (r"^set 'a' \(.*/a\) and set 'b' \(.*/b\) were tokenized with", {"a": a, "b": b}, None),
        (r"^the training data \(.*/a\) and set 'b' \(.*/b\) were", {"own": own, "b": b}, data),
        (r"^name is None, but batches is a dict of the sets \[\], whose", {}, None),
        ("^evaluate got no micro-batch of set 'empty'", {"set": [held_out()], "empty": []}, None),
    ]:
        with pytest.raises(ValueError, match=message):
            fk.evaluate(state, sets, logits_loss, trained_on=trained_on)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_in_the_state_changes(fails):
    """A part that is frozen in evaluation mode stays so."""
    state = dropout_state()
    state.model.layers[0].eval()
    state.model.norm.weight.grad = torch.ones_like(state.model.norm.weight)
    modes = [module.training for module in state.model.modules()]
    weights, gradients = full_tensors(state.model), full_tensors(state.model, gradients=True)
    noise, inside = torch.get_rng_state(), []

    def loss_fn(model, batch):
        inside.extend(module.training for module in model.modules())
        inside.append(torch.is_grad_enabled())
        if fails:
            raise RuntimeError("the batch is broken")
        return logits_loss(model, batch)

    with pytest.raises(RuntimeError, match="is broken") if fails else nullcontext():
        fk.evaluate(state, [held_out()], loss_fn)
    assert not any(inside)
    assert [module.training for module in state.model.modules()] == modes
    assert state.step == state.samples == 0
    assert_same(full_tensors(state.model), weights)
    assert_same(full_tensors(state.model, gradients=True), gradients)
    assert torch.equal(torch.get_rng_state(), noise)
    assert torch.is_grad_enabled()


def _stopped(rank, world, asks):
    state = build_state({"dp_shard": 2}, world, dtype=torch.float64)
    stop, pulled = fk.StopSignal(signals=()), []

    def pull():
        for number in range(9):
            if number == 3 and rank == asks:
                stop.request("enough")
            pulled.append(number)
            yield global_batch(world)[0][rank]

    sets = {"first": [row[rank] for row in global_batch(world)[:1]], "second": pull()}
    found = fk.evaluate(state, sets, logits_loss, stop=stop)
    return len(pulled), list(found.keys()), stop.reason


def test_an_evaluation_ends_on_all_ranks_after_one_asked_for_a_stop_and_reports_no_set():
    here, there = run_again(_stopped, 2, 1)
    assert here == (6, [], "another rank")  # the vote before the fourth is heard two later
    assert there == (6, [], "enough")


def _gradient_after(rank, world, layout):
    """After an evaluation that failed, and after one that did not."""
    state = build_state(layout, world, dtype=torch.float64)

    def broken(model, batch):
        model(batch["input_ids"])
        raise RuntimeError("broken")

    batches, found = [row[rank] for row in global_batch(world)], []
    for loss_fn in (broken, logits_loss):
        with pytest.raises(RuntimeError, match="broken") if loss_fn is broken else nullcontext():
            fk.evaluate(state, batches, loss_fn)
        assert all(hasattr(p, "placements") for p in state.model.parameters())
        found.append(mean_gradients(state, batches, logits_loss))
    return found


LAYOUTS = [(world, layout) for world, layout, _ in RANKS]


@pytest.mark.parametrize(("world", "layout"), first_of(LAYOUTS[:1], LAYOUTS))
def test_a_step_after_an_evaluation_has_the_right_gradient(world, layout):
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(world))
    for found in run_again(_gradient_after, world, layout):
        assert max(relative_error(gradient, expected) for gradient in found) < 1e-10
