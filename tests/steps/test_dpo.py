"""The preference loss: its value, its reference, its gradient in every layout, what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import partial
from itertools import product

import adapted
import attrs
import pytest
import torch
from covering import first_of
from lab import full, lay_out, reference_gradients, relative_error
from pool import on_ranks, run_again
from steps import trl_figures
from steps.preferences import SPEC, expected, rows
from torch.func import functional_call

import forgekit as fk

KINDS = ("sigmoid", "hinge", "ipo")
BETA = 0.7


def model_of(seed, dtype=torch.float64):
    return fk.Transformer(SPEC, seed=seed).to(dtype)


def adapted_model(**options):
    """A model with an adapter on each matrix, which has moved."""
    model = model_of(0)
    options = {"rank": 4, "alpha": 16.0, "targets": ("*.query", "*.up", "output")} | options
    return adapted.move(fk.add_lora(model, seed=3, **options))


def means(loss):
    return {name: float(total) / int(count) for name, (total, count) in loss.metrics.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_documents_one_by_one(kind):
    """An answer without a prompt is among them: its first token is neither scored nor counted."""
    model, frozen, batch = model_of(1), model_of(2), rows()
    found = fk.dpo_loss(model, batch, reference=frozen, kind=kind, beta=BETA)
    total, count, metrics = expected(batch, model, frozen, kind, BETA)
    assert found.sum.item() == pytest.approx(total.item(), rel=1e-12)
    assert int(found.count) == count == 6
    assert means(found) == pytest.approx(metrics, rel=1e-11)
    assert 0 < metrics["dpo/accuracy"] < 1
    assert found.rows[1].tolist() == [2, 2, 1, 1]
    assert float(found.rows[0].sum()) == pytest.approx(total.item(), rel=1e-12)


def test_a_masked_micro_batch_has_no_pair_and_what_is_masked_may_be_nan():
    model, frozen, batch = model_of(1), model_of(2), rows()
    batch["labels"][:] = -100
    found = fk.dpo_loss(model, batch, reference=frozen)
    assert (found.sum.item(), int(found.count)) == (0, 0)
    found.sum.backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())

    def poisoned(model, batch):
        logits = model(batch["input_ids"], doc_ids=batch["doc_ids"])
        return logits.masked_fill((batch["labels"] == -100)[..., None], math.nan)

    whole = rows()
    clean = fk.dpo_loss(model, whole, reference=frozen)
    found = fk.dpo_loss(model, whole, reference=frozen, forward=poisoned)
    assert found.sum.item() == clean.sum.item()


def check_figures(figures, beta):
    """Compare with what trl has found: the loss, and what it reports, means over pairs."""
    spec = attrs.evolve(SPEC, qk_norm=False)
    model, frozen = fk.Transformer(spec, seed=1), fk.Transformer(spec, seed=2)
    named = {"margins": "margin", "accuracies": "accuracy"}
    named |= {"chosen": "chosen_reward", "rejected": "rejected_reward"}
    assert figures.keys() == set(KINDS)
    for kind, theirs in figures.items():
        loss = fk.dpo_loss(model, rows(), reference=frozen, kind=kind, beta=beta)
        found = {"loss": loss.sum.item() / int(loss.count)}
        found |= {f"rewards/{its}": means(loss)[f"dpo/{name}"] for its, name in named.items()}
        assert found == pytest.approx(theirs, rel=1e-5, abs=1e-6), kind


def test_the_loss_is_that_of_trl():
    """Its figures are stored, with the inputs; the next test computes them anew."""
    stored = json.loads(trl_figures.STORED.read_text())
    assert stored["trl"].startswith("1.16.")
    check_figures(stored["figures"], stored["beta"])


@pytest.mark.oracle
def test_the_stored_figures_are_those_of_trl_today(tmp_path):
    inputs = trl_figures.write_inputs(tmp_path)
    assert inputs == json.loads(trl_figures.STORED.read_text())["inputs"]
    subprocess.run([sys.executable, trl_figures.__file__, str(tmp_path)], check=True)
    figures = json.loads((tmp_path / "figures.json").read_text())
    check_figures(figures, trl_figures.BETA)
    stored = json.loads(trl_figures.STORED.read_text())["figures"]
    for kind, values in figures.items():
        assert values == pytest.approx(stored[kind], rel=1e-5, abs=1e-6)


def test_the_first_step_has_a_loss_of_ln_2_and_no_margin():
    """Adapters add nothing yet, dropout of what they take or not."""
    model = fk.add_lora(model_of(0), rank=4, alpha=16.0, targets="*.query", dropout=0.5)
    found = fk.dpo_loss(model, rows(), beta=BETA)
    assert found.sum.item() / int(found.count) == pytest.approx(math.log(2), rel=1e-15)
    assert means(found)["dpo/margin"] == 0


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"dora": True, "targets": ("*.query",)}])
def test_the_reference_stays_while_adapters_train(options):
    """With dropout in the model too, and lengths of rows that are trained."""
    dropout = 0.3 if "dropout" in options else 0.0
    model = fk.Transformer(attrs.evolve(SPEC, dropout=dropout), seed=0).double()
    options = {"rank": 4, "alpha": 16.0, "targets": ("*.query", "*.up")} | options
    fk.add_lora(model, seed=3, **options)
    noted = []

    def noting(model, batch):
        logits = model(batch["input_ids"], doc_ids=batch["doc_ids"])
        if not torch.is_grad_enabled():
            noted.append(logits.clone())
        return logits

    state = fk.TrainState.create(model, fk.adamw(model, weight_decay=0.1), seed=0)
    loss_fn = partial(fk.dpo_loss, beta=BETA, forward=noting)
    step = fk.make_step(loss_fn, schedule=fk.constant(1e-2))
    for _ in range(4):
        state, metrics = step(state, [rows()])
    assert abs(float(metrics["dpo/margin"])) > 0.02
    assert len(noted) == 4
    with torch.no_grad():
        wanted = model_of(0).eval()(rows()["input_ids"], doc_ids=rows()["doc_ids"])
    assert all(torch.equal(logits, wanted) for logits in noted)
    assert all(module.training for module in model.modules())


def reference(case, kind, batches):
    """Gradients and the mean over all pairs, float64, one process, plain autograd."""
    model, frozen = model_of(1), model_of(2)
    if is_adapted := case in adapted.ADAPTED:
        model = adapted.move(adapted.build(case))
        base, frozen = (fk.Transformer(adapted.ADAPTED[case][0], seed=0).double() for _ in "ab")

    def loss_fn(model, batch):
        if is_adapted:
            weights = adapted.adapted_weights(case, dict(model.named_parameters()))
            model = partial(functional_call, base, weights)
        return fk.Loss(*expected(batch, model, frozen, kind, BETA)[:2])

    return reference_gradients(model, [batches], loss_fn)


def micro_batches(seed, world):
    """``[micro-batch][rank]``: ragged numbers of pairs; the last rank has a micro-batch without."""
    # Answers lose their ends, and in the second one its partner.
    whole = [rows(seed, length) for length in (16, 14)]
    whole[1]["labels"][2:] = -100
    size = len(whole[0]) // world
    return [[batch[size * rank : size * (rank + 1)] for rank in range(world)] for batch in whole]


def measure(rank, world, case, kind, sizes, options):
    """The gradient and the metrics of one step in a layout."""
    frozen = None
    if case in adapted.ADAPTED:
        state = lay_out(adapted.move(adapted.build(case)), sizes, **options)
    else:
        state = lay_out(model_of(1), sizes, **options)
        frozen = fk.parallelize(model_of(2).requires_grad_(False), state.mesh)
    loss_fn = partial(fk.dpo_loss, reference=frozen, kind=kind, beta=BETA)
    turn, ranks = fk.data_ranks(state.mesh)
    mine = [row[turn] for row in micro_batches(5, ranks)]
    totals = fk.reduce_totals(fk.accumulate(state, mine, loss_fn), state)
    found = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    return found, fk.step_metrics(totals, fk.clip(totals, max_norm=1.0), lr=0.0)


FSDP, TP = {"dp_shard": 2}, {"dp_shard": 1, "tp": 2}
CELLS = [("dense", "sigmoid", FSDP, {}), ("model", "ipo", TP, {})]
EVERY = [
    *((*row, {}) for row in product(("dense", "model"), KINDS, (FSDP, TP))),
    ("dense", "hinge", FSDP, {"activation_checkpoint": "full"}),
    ("experts", "sigmoid", {"dp_shard": 2, "ep": 2}, {}),
    ("dense", "sigmoid", {"dp_shard": 2, "tp": 2}, {}),
    ("model", "hinge", {"dp_replicate": 2, "dp_shard": 2}, {}),
]


@pytest.mark.parametrize(("case", "kind", "sizes", "options"), first_of(CELLS, EVERY))
def test_gradients_of_pairs_split_over_micro_batches_and_ranks_are_those_of_one_process(
    case, kind, sizes, options
):
    world = math.prod(size for name, size in sizes.items() if name != "ep")
    batches = [batch for row in micro_batches(5, world // sizes.get("tp", 1)) for batch in row]
    batches = [batch for batch in batches if (batch["labels"] != -100).any()]
    gradients, loss = reference(case, kind, batches)
    assert all(gradient.any() for gradient in gradients.values())
    pairs = sum(expected(b, model_of(1), model_of(2), kind, BETA)[1] for b in batches)
    for found, metrics in run_again(measure, world, case, kind, sizes, options):
        assert relative_error(found, gradients) < 1e-12
        assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-12)
        assert metrics["targets"] == pairs


@on_ranks(2)
def test_layouts_in_which_an_answer_is_not_whole_are_refused_by_name(rank, world):
    pipelined = "a pipeline runs one model call per micro-batch. Use a mesh with pp=1"
    sliced = "with cp=2 each rank holds a slice. Use a mesh with cp=1"
    for name, message in (("pp", pipelined), ("cp", sliced)):
        state = lay_out(adapted_model(targets=("*.query",)), {"dp_shard": 1, name: 2})
        step = partial(fk.accumulate, state, [rows(), rows()], fk.dpo_loss)
        for refuses in (partial(fk.check_dpo, state.model), step):
            with pytest.raises((ValueError, RuntimeError), match=message):
                refuses()


REFUSED = {
    "no adapters": (lambda _: model_of(1), fk.check_dpo, r"no adapters, .* reference=model\)"),
    "itself": (
        None,
        lambda model: fk.dpo_loss(model, rows(), reference=model),
        "reference is the model that is trained, so margins",
    ),
    "no beta": (None, partial(fk.dpo_loss, batch=rows(), beta=0.0), "beta is 0.0; it must be p"),
    "a merged model": (fk.merge_lora, fk.check_dpo, r"the adapters of '.*' are merged into"),
    "a reference that would move": (
        lambda model: model.norm.requires_grad_() and model,
        fk.check_dpo,
        "'norm.weight' is trained besides the adapters, so a reference without them would move",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_preference_is_refused(case):
    change, refuses, message = REFUSED[case]
    model = adapted_model()
    if change is not None:
        model = change(model) or model
    with pytest.raises(ValueError, match=message):
        refuses(model)


def test_rows_that_would_be_left_out_are_refused():
    batch = rows()
    with pytest.raises(ValueError, match=r"doc_ids has shape \(1, 24, 1\) and labels \(4, 24\)"):
        fk.document_log_probs(torch.zeros(4, 24, 40), batch["labels"], batch["doc_ids"][:1])


def test_padding_is_not_scored_whatever_its_labels():
    labels, doc_ids = torch.tensor([[2, 1, 3, 3]]), torch.tensor([[0, 1, 1, -1]])
    found = fk.document_log_probs(torch.zeros(1, 4, 4), labels, doc_ids)
    assert found.counts.tolist() == [[1, 2, 0, 0]]
