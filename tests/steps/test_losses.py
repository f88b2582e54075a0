"""Both losses against torch's cross-entropy and the formula of the z-loss, in float64."""

from __future__ import annotations

import pytest
import torch
from lab import Watch
from steps.projections import (
    DIM,
    HIDDEN,
    LABELS,
    MASKED,
    PLACES,
    ROWS,
    VOCAB,
    WEIGHT,
    draw,
    reference,
)

import forgekit as fk
from forgekit.steps import cross_entropy as cross_entropy_file

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["logits", "linear"])
def loss_of(request):
    """``loss_of(hidden, weight, labels, z_loss)`` by one of the two functions."""
    if request.param == "linear":
        return fk.linear_cross_entropy
    return lambda hidden, weight, *rest: fk.cross_entropy(hidden @ weight.T, *rest)


# Values and gradients


CASES = [(0.0, 1, None), (0.3, 7, NAN), (0.0, 15, INF), (0.3, 1000, -INF)]
"""Weight of the z-loss, rows of a chunk, and what stands at masked positions."""


def check(loss, expected, inputs, clean):
    torch.testing.assert_close(loss.sum, expected, rtol=1e-13, atol=0)
    assert int(loss.count) == int((~MASKED).sum()) == 11
    found = torch.autograd.grad(loss.sum * 0.125, inputs)
    for gradient, wanted in zip(found, torch.autograd.grad(expected * 0.125, clean), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
    assert not found[0][MASKED].any()


@pytest.mark.parametrize("columns", [slice(None), slice(1)], ids=["all", "one"])
@pytest.mark.parametrize(("z_loss", "value"), [(z_loss, value) for z_loss, _, value in CASES])
def test_cross_entropy_equals_torch_whatever_stands_in_masked_logits(z_loss, value, columns):
    clean = draw(ROWS, PLACES, VOCAB).requires_grad_()
    dirty = clean.detach().clone()
    if value is not None:
        dirty[..., columns].masked_fill_(MASKED[..., None], value)
    loss = fk.cross_entropy(dirty.requires_grad_(), LABELS, z_loss)
    check(loss, reference(clean, LABELS, z_loss), [dirty], [clean])


@pytest.mark.parametrize(("z_loss", "chunk", "value"), CASES)
def test_linear_cross_entropy_equals_torch_in_chunks_of_any_size(monkeypatch, z_loss, chunk, value):
    monkeypatch.setattr(cross_entropy_file, "chunk_rows", lambda weight: chunk)
    clean, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    dirty = clean.detach().masked_fill(MASKED[..., None], value or 0.0).requires_grad_()
    loss = fk.linear_cross_entropy(dirty, weight, LABELS, z_loss)
    expected = reference(clean @ weight.T, LABELS, z_loss)
    check(loss, expected, [dirty, weight], [clean, weight])


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_sixteen_bit_inputs_have_a_float32_loss(loss_of, z_loss):
    inputs = [HIDDEN.bfloat16().requires_grad_(), WEIGHT.bfloat16().requires_grad_()]
    loss = loss_of(*inputs, LABELS, z_loss)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference(wide[0] @ wide[1].T, LABELS, z_loss)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(expected.item(), rel=5e-3)
    found = torch.autograd.grad(loss.sum, inputs)
    for mine, theirs in zip(found, torch.autograd.grad(expected, wide), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()


@pytest.mark.parametrize(("rows", "vocab", "chunk"), [(200, 90, 10), (50, 2**19, None)])
def test_all_logits_are_never_held(monkeypatch, rows, vocab, chunk):
    """By itself it takes 16 rows of half a million logits at a time."""
    if chunk is not None:
        monkeypatch.setattr(cross_entropy_file, "chunk_rows", lambda weight: chunk)
    hidden, weight = torch.ones(rows, 1), torch.ones(vocab, 1)
    with Watch() as seen:
        labels = torch.arange(rows) % vocab
        fk.linear_cross_entropy(hidden.requires_grad_(), weight, labels, z_loss=0.1).sum.backward()
    assert seen.largest == (chunk or 16) * vocab


# Masked places


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_without_targets_the_loss_and_its_gradient_are_zero(loss_of, z_loss):
    inputs = [draw(ROWS, PLACES, DIM).requires_grad_(), draw(VOCAB, DIM).requires_grad_()]
    loss = loss_of(*inputs, torch.full_like(LABELS, -100), z_loss)
    assert (loss.sum.item(), int(loss.count)) == (0.0, 0)
    for gradient in torch.autograd.grad(loss.sum, inputs):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_nan_in_another_gradient_of_the_same_logits_stays():
    """Only the loss's own gradient is cleaned, or a broken auxiliary loss would go unnoticed."""
    logits = draw(PLACES, VOCAB).requires_grad_()
    loss = fk.cross_entropy(logits, LABELS[0]).sum + (logits * float("nan")).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.isnan().all()


def test_nan_at_a_target_makes_the_loss_nan(loss_of):
    """So that the step is a bad one: a gradient alone could hide it."""
    hidden, weight = draw(ROWS, PLACES, DIM), draw(VOCAB, DIM)
    hidden[1, 1, 0] = NAN
    assert loss_of(hidden, weight, LABELS, 0.3).sum.isnan()


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_the_vocabulary_raises(loss_of, label):
    labels = LABELS.clone()
    labels[1, 0] = label
    with pytest.raises((IndexError, RuntimeError), match=rf"{label} is out of bounds"):
        loss_of(draw(ROWS, PLACES, DIM), draw(VOCAB, DIM), labels, 0.0)


# Loss


def test_losses_over_the_same_targets_add_up():
    count = torch.tensor(3)
    first = fk.Loss(torch.tensor(2.0), count, {"a": (1.0, 2)}, (torch.tensor([2.0]), count[None]))
    second = fk.Loss(torch.tensor(5.0), count, {"b": 4.0}, (torch.tensor([5.0]), count[None]))
    both = first + second
    assert both.count is count
    assert (both.sum, both.metrics) == (7.0, {"a": (1.0, 2), "b": 4.0})
    assert [part.tolist() for part in both.rows] == [[7.0], [3]]
    assert (first + fk.Loss(torch.tensor(1.0), 3)).rows is None


def test_losses_of_different_counts_are_refused_with_both_ways_out():
    first, second = fk.Loss(torch.tensor(1.0), 3), fk.Loss(torch.tensor(2.0), torch.tensor(4))
    message = r"^cannot add losses with counts 3 and 4. .*token_weighted.*forgekit\.count_ahead"
    with pytest.raises(ValueError, match=message):
        first + second


@pytest.mark.parametrize("split", [[8], [3, 5]])
def test_with_mean_weights_micro_batch_means_by_their_targets(split):
    """Over a split: sum of (targets * weight * mean), divided by all targets once."""
    weight = draw(VOCAB, DIM).requires_grad_()
    hidden, labels = draw(8, DIM, seed=4), torch.arange(8) % VOCAB
    labels[[1, 6]] = -100
    total, expected = [], reference(hidden @ weight.T, labels, 0.0)
    for h, y in zip(hidden.split(split), labels.split(split), strict=True):
        logits = h @ weight.T
        mean, base = logits.square().mean(), fk.cross_entropy(logits, y)
        loss = base.with_mean(mean, weight=0.2)
        assert loss.count is base.count
        total.append(loss.sum)
        expected = expected + 0.2 * mean * (y != -100).sum()
    (found,) = torch.autograd.grad(sum(total), weight, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("weight", "labels", "message"),
    [((5, 4), (6,), r"^hidden has shape \(2, 3, 4\) and l"), ((4, 5), (2, 3), "^weight has shape")],
)
def test_shapes_that_do_not_fit_are_refused(weight, labels, message):
    labels = torch.zeros(labels, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        fk.linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(weight), labels)


def test_one_name_for_two_metrics_is_refused():
    loss = fk.Loss(torch.tensor(1.0), 3, {"a": 1.0, "b": 1.0})
    for twice in (lambda: loss + loss.with_metrics(c=2.0), lambda: loss.with_metrics(b=2.0)):
        with pytest.raises(
            ValueError, match=r"^both losses have metrics named \[.*'b'\]; rename them"
        ):
            twice()
