"""Experts in a step: exact router terms, counts that count once, one change of balance a step."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from lab import Watch, full, lay_out, relative_error
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk
from forgekit.evaluation.replay import replay_step
from forgekit.model.moe import MoE
from forgekit.model.moe_spec import cosine_rate
from forgekit.parallel.activation_checkpoint import recompute
from forgekit.steps.experts import StepRouters, expert_metrics

MOE = fk.MoESpec(
    experts=6,
    top_k=2,
    ffn_dim=8,
    shared=1,
    first=1,
    every=2,
    scale=1.7,
    aux_loss=0.3,
    z_loss=0.05,
    sequence_aux_loss=0.2,
    bias_rate=0.02,
)
SPEC = fk.TransformerSpec(
    vocab_size=19, dim=16, layers=4, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=12, moe=MOE
)
ROWS = 8
ZERO = {"aux_loss": 0.0, "z_loss": 0.0, "sequence_aux_loss": 0.0}
SCHEDULE = fk.constant(0.05)


def build(dtype=torch.float64, **changes):
    """A model with scores far apart and loads that are not even."""
    model = fk.Transformer(attrs.evolve(SPEC, moe=attrs.evolve(MOE, **changes))).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(12)
        for layer in routed(model):
            load = torch.rand(6, generator=generator) + 0.1
            layer.router.load.copy_(load / load.sum())
    return model


def routed(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def sgd(model):
    return torch.optim.SGD(model.parameters())


def create(model=None, **options):
    model = build() if model is None else model
    return fk.TrainState.create(model, sgd(model), **options)


def rows(seed=0, count=ROWS, positions=9):
    """Rows with ragged padding and targets; the last row has no target."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    ids, labels = draw(0, 19, (count, positions)), draw(0, 19, (count, positions))
    doc_ids = (torch.arange(positions) // 4).expand(count, positions).clone()
    for row in range(count):
        doc_ids[row, positions - row % 4 :] = -1
    labels[(doc_ids < 0) | (draw(0, 10, labels.shape) < 3)] = -100
    labels[-1] = -100
    return TensorDict({"input_ids": ids, "labels": labels, "doc_ids": doc_ids}, [count])


def split(batch, sizes):
    return list(batch.split(sizes))


def loss_fn(model, batch, targets=lambda batch: batch["labels"] != -100, **options):
    given = {"doc_ids": batch["doc_ids"], "targets": targets(batch), **options}
    return fk.cross_entropy(model(batch["input_ids"], **given), batch["labels"])


def run(state, batches, loss_fn=loss_fn):
    """Gradients, and how often each expert was chosen."""
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    found = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    return found, totals.sums["experts", "counts"].tolist()


def test_without_targets_terms_are_summed_over_all_that_is_no_padding():
    def by(targets):
        loss = partial(loss_fn, targets=targets)
        return run(create(), split(rows(), [3, 5]), loss)[0]

    without, told = by(lambda batch: None), by(lambda batch: batch["doc_ids"] >= 0)
    assert all(torch.equal(without[name], told[name]) for name in told)
    assert relative_error(by(lambda batch: batch["labels"] != -100), told) > 1e-3


# Where the auxiliary loss settles


def usual_form(layer, x):
    """``e`` times the sum of today's shares of the load, held constant, and mean probability."""
    probabilities = (x @ layer.router.weight.T).softmax(-1).flatten(0, 1)
    counts = torch.bincount(probabilities.topk(2).indices.flatten(), minlength=6)
    return 6 * (counts.double() / counts.sum() * probabilities.mean(0)).sum()


def test_at_rest_the_gradient_is_that_of_the_usual_form():
    """With weights that stay, the shares of the last step are those of this one."""
    model = build(**{**ZERO, "aux_loss": 1.0}, bias_rate=None, first=3)
    batch = rows()
    batch["doc_ids"].zero_(), batch["labels"].fill_(3)

    def only_terms(model, batch):
        loss = loss_fn(model, batch)
        return fk.Loss(loss.sum * 0.0, loss.count)

    state = create(model)
    (layer,), entered, gradients = routed(model), [], []
    layer.register_forward_pre_hook(lambda _, args: entered.append(args[0].detach()))
    for _ in range(2):
        totals = fk.reduce_totals(fk.accumulate(state, [batch], only_terms), state)
        gradients.append(fk.gradients(state, totals)["layers.3.feed_forward.router.weight"])
        state = fk.update(state, fk.clip(totals), lr=0.0, totals=totals)
    value = usual_form(layer, entered[0])
    expected = torch.autograd.grad(value, layer.router.weight)[0]
    assert relative_error({"w": gradients[1]}, {"w": expected}) < 1e-6  # shares are float32
    assert relative_error({"w": gradients[0]}, {"w": expected}) > 0.1


# Balance


def balance(state):
    return [
        None if buffer is None else buffer.clone()
        for layer in routed(state.model)
        for buffer in (layer.router.load, layer.router.selection_bias)
    ]


def is_same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def train(steps, sizes=(ROWS,), model=None, loss_fn=loss_fn, change=lambda _, batches: batches):
    """``change`` makes other micro-batches of those of a step."""
    state = create(model)
    step = fk.make_step(loss_fn, schedule=SCHEDULE)
    for index in range(steps):
        state, metrics = step(state, change(state, split(rows(index), sizes)))
    return state, metrics


@pytest.mark.parametrize("centered", [True, False])
def test_the_bias_moves_once_a_step_by_the_sign_of_the_load(centered):
    state = create(build(centered=centered, bias_rate=cosine_rate(0.3)))
    step = fk.make_step(loss_fn, schedule=SCHEDULE, total=4)
    expected = [torch.zeros(6) for _ in routed(state.model)]
    for index, rate in enumerate([0.3, 0.25606602, 0.15]):
        batches = split(rows(index), [3, 5])
        counts = torch.tensor(run(state, batches)[1], dtype=torch.float64)
        state, _ = step(state, batches)
        for number, (layer, counted) in enumerate(zip(routed(state.model), counts, strict=True)):
            change = rate * (counted.mean() - counted).sign()
            expected[number] += change - change.mean() * centered
            torch.testing.assert_close(
                layer.router.selection_bias, expected[number], rtol=0, atol=1e-6
            )
            assert torch.equal(layer.router.load, (counted / counted.sum()).float())
    assert all(abs(bias.sum()) < 1e-6 for bias in expected) == centered


def test_balance_is_bitwise_the_same_for_any_split_and_recomputation():
    expected, _ = train(5)
    for sizes, what in (([3, 5], "none"), ([8], "full"), ([2, 6], "selective")):
        model = build()
        for block in model.layers:
            recompute(block, what)
        found, _ = train(5, sizes, model)
        assert is_same(balance(found), balance(expected)), (sizes, what)


def test_padding_and_micro_batches_without_a_token_change_no_balance():
    empty, fill = rows(7), {"input_ids": 3, "labels": -100, "doc_ids": -1}
    empty["labels"].fill_(-100), empty["doc_ids"].fill_(-1)

    def padded(_, batches):
        (batch,) = batches
        longer = {key: F.pad(batch[key], (0, 2), value=value) for key, value in fill.items()}
        return [TensorDict(longer, [ROWS]), empty]

    (expected, _), (state, metrics) = train(3), train(3, change=padded)
    assert is_same(balance(state), balance(expected))
    assert metrics["moe/dropped"] == 0


def test_evaluation_and_other_forwards_count_nothing():
    def with_other_looks(model, batch):
        with torch.no_grad():
            model(batch["input_ids"].flip(1))
        return loss_fn(model, batch)

    def looks(state, batches):
        fk.evaluate(state, [rows(50)], loss_fn)
        fk.generate(state.model, torch.arange(3).view(1, 3), max_new_tokens=2)
        return batches

    expected, _ = train(3, [3, 5])
    state, _ = train(3, [3, 5], loss_fn=with_other_looks, change=looks)
    assert is_same(balance(state), balance(expected))


def test_a_bad_step_changes_no_balance():
    state, _ = train(2, [3, 5])
    before, batch = balance(state), rows(9)
    batch["labels"].fill_(-100)
    step = fk.make_step(loss_fn, schedule=SCHEDULE)
    for rows_of_step, is_bad in ((batch, True), (rows(9), False)):
        state, metrics = step(state, [rows_of_step])
        assert (metrics["skipped"] == 1) == is_same(balance(state), before) == is_bad


def test_the_layer_whose_router_gets_what_is_not_finite_is_named():
    """By the sums of the step, which the collective has already, and exactly by a replay."""
    state = create()
    with torch.no_grad():
        state.model.get_parameter("layers.2.feed_forward.down.weight")[0] = torch.inf
    totals = fk.reduce_totals(fk.accumulate(state, split(rows(), [3, 5]), loss_fn), state)
    assert not fk.clip(totals).finite
    is_fine = totals.sums["experts", "z_loss"].isfinite().tolist()
    assert [*zip(SPEC.routed, is_fine, strict=True)] == [(1, True), (3, False)]
    replay = replay_step(state, split(rows(), [3, 5]), loss_fn)
    assert replay.first_bad_output == "layers.2.feed_forward.down"


def _save_in_stages(rank, world, folder):
    state = lay_out(build(), {"dp_shard": 1, "pp": 2}, sgd)
    state, _ = fk.make_step(loss_fn, schedule=SCHEDULE)(state, split(rows(), [4, 4]))
    fk.checkpoint_save(state, folder, blocking=True)
    return dict(state.model.named_buffers())


def test_the_balance_of_all_stages_is_in_their_checkpoint(tmp_path):
    held = {}
    for buffers in run_ranks(_save_in_stages, 2, tmp_path):
        assert buffers
        held |= buffers
    state = fk.checkpoint_load(create(), tmp_path)
    torch.testing.assert_close(dict(state.model.named_buffers()), held, rtol=0, atol=0)
    assert not is_same(balance(state), balance(create()))


def test_a_frozen_bias_stays():
    """An imported one; the load still follows, for the auxiliary loss."""
    model = build(bias_rate=None, selection_bias=True)
    for layer in routed(model):
        layer.router.selection_bias.copy_(torch.arange(6.0) / 10)
    state, metrics = train(2, model=model)
    load, bias, *_ = balance(state)
    assert torch.equal(bias, torch.arange(6.0) / 10)
    assert not torch.equal(load, build().layers[1].feed_forward.router.load)
    assert metrics["moe/bias_range"] == pytest.approx(0.5)


def test_nothing_is_read_by_the_host():
    model = build(torch.float32, capacity=1.1)
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=SCHEDULE)
    state, _ = step(state, [rows()])
    with Watch() as reads:
        state, _ = step(state, [rows(1)])
        totals = fk.reduce_totals(fk.accumulate(state, [rows(2)], loss_fn), state)
        expert_metrics(totals.sums)
    assert reads.host_reads == []


# Errors


def test_experts_that_a_step_cannot_follow_are_refused():
    with pytest.raises(ValueError, match=r"^loss_fn did not call Transformer with gradients, so"):
        fk.accumulate(create(), [rows()], lambda model, batch: loss_fn(model.forward, batch))
    twins = torch.nn.ModuleList([build(), build()])
    with pytest.raises(ValueError, match=r"^the model has 2 Transformers with experts, whose"):
        StepRouters(twins.modules(), torch.ones(()), torch.device("cpu"))
