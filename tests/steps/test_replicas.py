"""The sum over replica groups and the vote, without torchft: groups in threads of one process.

What a group is told by its neighbours comes from threads here;
`tests/replicas/test_replica_groups.py` has processes that torchft keeps track of.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import attrs
import pytest
import torch
from lab import (
    SPEC,
    full,
    global_batch,
    logits_loss,
    reference_gradients,
    relative_error,
)
from pool import on_ranks
from saved import assert_same, everything

import forgekit as fk

EVEN = attrs.evolve(SPEC, vocab_size=40, dim=48, heads=4)  # for two ranks to share it
EXPERTS = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, aux_loss=0.1, bias_rate=0.01)


class Share(list):
    """Micro-batches as ``loader.share`` gives them."""

    first_number = 0
    samples = 0
    whole = (3, 2)


def shares(batches, groups, rows, multiple=1):
    """Each group's share of a step's micro-batches; another one's where there are too few."""
    made = []
    for group in range(groups):
        low, high = (
            g * (len(batches) // multiple) // groups * multiple for g in (group, group + 1)
        )
        share = Share(batches[low : max(high, low + multiple)])
        share.first_number, share.samples = low, (high - low) * rows
        made.append(share)
    return made


class Exchange:
    """Sums of several groups, each in a thread of its own."""

    def __init__(self, groups):
        self.given = [None] * groups
        self.barrier = Barrier(groups)
        self.pool = ThreadPoolExecutor(groups)
        self.fails = set()  # groups that have lost the others
        self.votes = [None] * groups

    def __call__(self, states, totals):
        """Sum the totals of all groups; what each returns or raises."""
        jobs = []
        for group, each in enumerate(zip(totals, states, strict=True)):
            calls = {"sum": partial(self.sum, group), "commit": partial(self.commit, group)}
            jobs.append(self.pool.submit(fk.sum_replicas, *each, SimpleNamespace(**calls)))
        return [job.exception() or job.result() for job in jobs]

    def sum(self, group, tensors):
        self.given[group] = [tensor.clone() for tensor in tensors]
        self.barrier.wait(20)
        for tensor, *others in zip(tensors, *self.given, strict=True):
            tensor.copy_(sum(others[1:], others[0]))
        self.barrier.wait(20)
        is_header = tensors[0].dtype == torch.int64
        return is_header or group not in self.fails

    def commit(self, group, good):
        self.votes[group] = good
        return good


def build(layout=None, *, spec=EVEN, adapters=False):
    model, mesh = fk.Transformer(spec), None
    model = (fk.add_lora(model, rank=2) if adapters else model).double()
    if layout:
        mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
        model = fk.parallelize(model, mesh)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh, average=fk.EMA(0.9))


def finish(state, totals):
    totals = fk.reduce_totals(totals, state)
    return fk.update(state, fk.clip(totals, max_norm=1.0), lr=0.1, totals=totals), totals


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "groups"), [({"dp_shard": 2}, 6), ({"tp": 2}, 2), ({"pp": 2}, 2)]
)
@on_ranks(2, keep=True)
def test_gradients_of_groups_are_those_of_one_process(rank, world, layout, groups):
    """Of six groups two have no row; counts of targets are ragged."""
    states = [build(layout) for _ in range(groups)]
    reader, readers = fk.data_ranks(states[0].mesh)
    everybody = [global_batch(readers, seed=seed)[1] for seed in range(4)]  # of one shape
    rows = 2 * readers
    parts = shares([row[reader] for row in everybody], groups, rows, layout.get("pp", 1))
    totals = [fk.accumulate(*each, logits_loss) for each in zip(states, parts, strict=True)]
    expected, loss = reference_gradients(fk.Transformer(EVEN), everybody)
    for state, sums in zip(states, Exchange(groups)(states, totals), strict=True):
        assert sums.samples == 4 * rows
        totals = fk.reduce_totals(sums, state)
        found = {name: full(g) for name, g in fk.gradients(state, totals).items()}
        assert relative_error(found, {name: expected[name] for name in found}) < 1e-10
        torch.testing.assert_close(totals["loss"] / totals["targets"], loss, rtol=1e-12, atol=0)
        norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
        torch.testing.assert_close(fk.clip(totals).grad_norm, norm, rtol=1e-10, atol=0)


@pytest.fixture
def batches():
    return [row[0] for row in global_batch(1)]


def step_of(states, batches, exchange, loss_fn=logits_loss, *, votes=False):
    parts = shares(batches, len(states), 2)
    totals = [fk.accumulate(s, part, loss_fn) for s, part in zip(states, parts, strict=True)]
    if votes:  # of the first, which may have no rows
        vote = torch.ones_like(totals[0]["loss"])
        totals = [one.plus(stop=vote * (n == 0)) for n, one in enumerate(totals)]
    return exchange(states, totals)


def skips_a_layer(model, batch):
    """In the longest rows alone, which are one group's."""
    kept = model.layers
    model.layers = kept[:1] if batch["input_ids"].shape[1] == 16 else kept
    try:
        return logits_loss(model, batch)
    finally:
        model.layers = kept


@pytest.mark.parametrize(
    ("spec", "groups", "adapters", "loss_fn"),
    [
        (attrs.evolve(EVEN, dropout=0.5), 3, False, logits_loss),
        # Of five two have no rows and compute a micro-batch of another: routers must not count it.
        (attrs.evolve(EVEN, moe=EXPERTS), 5, False, logits_loss),
        # What a group did not use is zero there; what no group trains has no gradient to add.
        (EVEN, 3, True, skips_a_layer),
    ],
    ids=["dropout", "experts", "a skipped layer and frozen parameters"],
)
def test_groups_train_as_one(batches, spec, groups, adapters, loss_fn):
    one, *states = (build(spec=spec, adapters=adapters) for _ in range(1 + groups))
    one, expected = finish(one, fk.accumulate(one, batches, loss_fn))
    summed = step_of(states, batches, Exchange(groups), loss_fn, votes=True)
    for state, totals in zip(states, summed, strict=True):
        new, reduced = finish(state, totals)
        assert_close(everything(new), everything(one))
        found, wanted = (dict(each.sums.items(True, True)) for each in (reduced, expected))
        assert float(found.pop("stop")) == 1.0
        assert_close(found, wanted)


def test_what_is_not_finite_in_one_group_skips_the_step_in_all(batches):
    states = trained(3, batches)
    before = [everything(state) for state in states]

    def broken(model, batch):
        loss = logits_loss(model, batch)
        factor = torch.nan if torch.equal(batch["input_ids"], batches[1]["input_ids"]) else 1.0
        return fk.Loss(loss.sum * factor, loss.count)

    for index, totals in enumerate(step_of(states, batches, Exchange(3), broken)):
        new, _ = finish(states[index], totals)
        changed = {"step": torch.tensor(2), "samples": torch.tensor(12), "skipped": torch.tensor(1)}
        assert_same(everything(new), before[index] | changed)


def trained(groups, batches):
    states = [build() for _ in range(groups)]
    totals = step_of(states, batches, Exchange(groups))
    return [finish(s, t)[0] for s, t in zip(states, totals, strict=True)]


def test_a_step_that_breaks_off_changes_nothing_and_comes_again_in_other_parts(batches):
    """Group 1 loses the others in the midst of a step; two groups do it again."""
    states, one = trained(3, batches), trained(1, batches)[0]
    one, _ = finish(one, fk.accumulate(one, batches, logits_loss))
    before = [everything(state) for state in states]
    exchange = Exchange(3)
    exchange.fails = {0, 1, 2}
    assert step_of(states, batches, exchange) == [None] * 3
    exchange.fails = {1}  # those that have all sums vote for the step; the other is behind
    assert [one is None for one in step_of(states, batches, exchange)] == [False, True, False]
    assert exchange.votes == [True, False, True]
    for state, was in zip(states, before, strict=True):
        assert_same(everything(state), was)
    survivors = states[::2]
    for state, totals in zip(survivors, step_of(survivors, batches, Exchange(2)), strict=True):
        assert_close(everything(finish(state, totals)[0]), everything(one))


OTHERS = {
    "other sums": (
        {"loss_fn": lambda *given: logits_loss(*given).with_metrics(other=(1.0, 1))},
        r"sums or step sizes differ from the other groups': .*\('metrics', 'other', 'sum'\)",
    ),
    "other sizes": ({"whole": (6, 2)}, r"sizes \[\(6, 2\)\] \(micro-batches, rows of each\)"),
    "another step": (
        {"at": {"step": 2, "samples": 12}},
        "sums or step sizes differ from the other",
    ),
    "no loss": ({"checked": {"problem": "a loss of means only"}}, "a loss of means only"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_newcomer_that_does_otherwise_is_refused_and_the_others_go_on(batches, case):
    changes, message = OTHERS[case]
    states = [trained(1, batches)[0], build()]
    at = changes.get("at", {"step": 1, "samples": 6})  # as one that was given the state
    states[1] = fk.donate(states[1], **at)
    parts = shares(batches, 2, 2)
    parts[1].whole = changes.get("whole", (3, 2))
    first = fk.accumulate(states[0], parts[0], logits_loss)
    second = fk.accumulate(states[1], parts[1], changes.get("loss_fn", logits_loss))
    checked = attrs.evolve(second.checked, **changes.get("checked", {}))
    second = attrs.evolve(second, checked=checked)
    first, second = Exchange(2)(states, [first, second])
    assert first is None
    assert isinstance(second, ValueError)
    assert re.search(message, str(second))


def test_totals_are_summed_once_and_one_group_alone_is_a_step_as_ever(batches):
    state, other = build(), build()
    totals = fk.accumulate(state, batches, logits_loss)
    summed = fk.sum_replicas(totals, state, fk.OneGroup())
    for again in (summed, fk.reduce_totals(totals, state)):
        with pytest.raises(ValueError, match="were summed before; call sum_replicas only once"):
            fk.sum_replicas(again, state, fk.OneGroup())
    new, _ = finish(state, summed)
    expected, _ = finish(other, fk.accumulate(other, batches, logits_loss))
    assert_same(everything(new), everything(expected))


def added(state, first, second):
    """What a step of two parts leaves."""
    with fk.begin_step(state) as step:
        step.add(first, logits_loss)
        step.add(second, logits_loss)
    return step.totals


def test_parts_of_a_step_add_up(batches):
    """What is drawn does not depend on who has which micro-batch, in a later call either."""
    one, *states = (build(spec=attrs.evolve(EVEN, dropout=0.5)) for _ in range(3))
    both = [shares(batches, 2, 2), shares(batches[::-1], 2, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    expected, _ = finish(one, added(one, batches, batches[::-1]))
    for state, sums in zip(states, Exchange(2)(states, totals), strict=True):
        assert_close(everything(finish(state, sums)[0]), everything(expected))


def test_a_share_without_rows_beside_one_with_rows_is_refused(batches):
    states = [build() for _ in range(2)]
    both = [shares(batches, 2, 2), shares(batches[:1], 2, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    said = Exchange(2)(states, totals)
    assert "this group has rows of one share of the step but none of another" in str(said[0])
    assert said[1] is None
