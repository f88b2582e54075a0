"""The sum over replica groups and the vote, without torchft: groups in threads of one process.

What a group is told by its neighbours comes from threads here;
`tests/replicas/test_replica_groups.py` has processes that torchft keeps track of.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

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
from pool import run_again

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
        members = [Member(self, group) for group in range(len(states))]
        jobs = [
            self.pool.submit(fk.sum_replicas, *each)
            for each in zip(totals, states, members, strict=True)
        ]
        return [job.exception() or job.result() for job in jobs]


@attrs.frozen
class Member:
    exchange: Exchange
    group: int

    def begin(self, state):
        return state, fk.Part(self.group, len(self.exchange.given))

    def sum(self, tensors):
        self.exchange.given[self.group] = [tensor.clone() for tensor in tensors]
        self.exchange.barrier.wait(20)
        for tensor, *others in zip(tensors, *self.exchange.given, strict=True):
            tensor.copy_(sum(others[1:], others[0]))
        self.exchange.barrier.wait(20)
        is_header = tensors[0].dtype == torch.int64
        return is_header or self.group not in self.exchange.fails

    def commit(self, good):
        self.exchange.votes[self.group] = good
        return good


def build(layout=None, *, spec=EVEN, adapters=False):
    model, mesh = fk.Transformer(spec), None
    model = (fk.add_lora(model, rank=2) if adapters else model).double()
    if layout:
        mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
        model = fk.parallelize(model, mesh)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh, average=fk.EMA(0.9))


def finish(state, totals, lr=0.1):
    totals = fk.reduce_totals(totals, state)
    correction = fk.clip(totals, max_norm=1.0)
    return fk.update(state, correction, lr=lr, totals=totals), totals, correction


def everything(state):
    """Bitwise all that a step may change."""
    entries = {
        f"{name} {key}": value.clone()
        for name, p in state.model.named_parameters()
        for key, value in state.optimizer.state.get(p, {}).items()
    }
    named = {n: full(p).detach().clone() for n, p in state.model.state_dict().items()}
    averages = {f"average {n}": v.clone() for n, v in state.average.values.items()}
    counters = {n: getattr(state, n).clone() for n in ("targets", "skipped", "loss_scale")}
    numbers = {n: torch.tensor(getattr(state, n)) for n in ("step", "samples")}
    return {**named, **entries, **averages, **counters, **numbers}


def assert_same(found, expected, rtol=0.0, atol=0.0):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def _gradients(rank, world, layout, groups):
    states = [build(layout) for _ in range(groups)]
    reader, readers = fk.data_ranks(states[0].mesh)
    everybody = global_batch(readers)
    batches = [row[reader] for row in everybody]
    if layout.get("pp", 1) > 1 or layout.get("tp", 1) > 1:  # of one shape, which two can share
        everybody = [global_batch(readers, seed=seed)[1] for seed in range(4)]
        batches = [row[reader] for row in everybody]
    rows = batches[0].batch_size[0] * readers
    totals = [
        fk.accumulate(state, share, logits_loss)
        for state, share in zip(
            states, shares(batches, groups, rows, layout.get("pp", 1)), strict=True
        )
    ]
    summed = Exchange(groups)(states, totals)
    expected, loss = reference_gradients(fk.Transformer(EVEN), everybody)
    for state, sums in zip(states, summed, strict=True):
        assert sums.samples == len(batches) * rows
        totals = fk.reduce_totals(sums, state)
        found = {name: full(g) for name, g in fk.gradients(state, totals).items()}
        mine = {name: expected[name] for name in found}
        assert relative_error(found, mine) < 1e-10
        torch.testing.assert_close(totals["loss"] / totals["targets"], loss, rtol=1e-12, atol=0)
        norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
        torch.testing.assert_close(fk.clip(totals).grad_norm, norm, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("layout", "groups"), [({"dp_shard": 2}, 5), ({"tp": 2}, 2), ({"pp": 2}, 2)]
)
def test_gradients_of_groups_are_those_of_one_process(layout, groups):
    """Of five groups two have no row; counts of targets are ragged."""
    run_again(_gradients, 2, layout, groups)


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
    one, expected, _ = finish(one, fk.accumulate(one, batches, loss_fn))
    summed = step_of(states, batches, Exchange(groups), loss_fn, votes=True)
    for state, totals in zip(states, summed, strict=True):
        new, reduced, _ = finish(state, totals)
        assert_same(everything(new), everything(one), 1e-9, 1e-12)
        found, wanted = (dict(each.sums.items(True, True)) for each in (reduced, expected))
        assert float(found.pop("stop")) == 1.0
        assert_same(found, wanted, 1e-9, 1e-12)


def test_what_is_not_finite_in_one_group_skips_the_step_in_all(batches):
    states = trained(3, batches)
    before = [everything(state) for state in states]

    def broken(model, batch):
        loss = logits_loss(model, batch)
        factor = torch.nan if torch.equal(batch["input_ids"], batches[1]["input_ids"]) else 1.0
        return fk.Loss(loss.sum * factor, loss.count)

    for index, totals in enumerate(step_of(states, batches, Exchange(3), broken)):
        new, _, correction = finish(states[index], totals)
        assert not correction.finite
        assert (new.step, new.samples, int(new.skipped)) == (2, 12, 1)
        now, changed = everything(new), {"step", "samples", "skipped"}
        assert_same(
            *({n: v for n, v in x.items() if n not in changed} for x in (now, before[index]))
        )


def trained(groups, batches):
    states = [build() for _ in range(groups)]
    totals = step_of(states, batches, Exchange(groups))
    return [finish(s, t)[0] for s, t in zip(states, totals, strict=True)]


def test_a_step_that_breaks_off_changes_nothing_and_comes_again_in_other_parts(batches):
    """Group 1 loses the others in the midst of a step; two groups do it again."""
    states, one = trained(3, batches), trained(1, batches)[0]
    one, _, _ = finish(one, fk.accumulate(one, batches, logits_loss))
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
        assert_same(everything(finish(state, totals)[0]), everything(one), 1e-9, 1e-12)


def _named(model, batch):
    return logits_loss(model, batch).with_metrics(other=(1.0, 1))


def _other_sizes(part):
    part.whole = (6, 2)


OTHERS = {
    "other sums": (
        {"loss_fn": _named},
        r"sums or step sizes differ from the other groups': .*\('metrics', 'other', 'sum'\)",
    ),
    "other sizes": (
        {"part": _other_sizes},
        r"sizes \[\(6, 2\)\] \(micro-batches, rows of each\)",
    ),
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
    changes.get("part", lambda part: None)(parts[1])
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
    new, _, _ = finish(state, summed)
    expected, _, _ = finish(other, fk.accumulate(other, batches, logits_loss))
    assert_same(everything(new), everything(expected))


def added(state, first, second):
    """What a step of two parts leaves."""
    with fk.begin_step(state) as step:
        step.add(first, logits_loss)
        step.add(second, logits_loss)
    return step.totals


def test_parts_of_a_step_add_up(batches):
    one, *states = (build() for _ in range(4))
    both = [shares(batches, 3, 2), shares(batches[::-1], 3, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    expected, _, _ = finish(one, added(one, batches, batches[::-1]))
    for state, sums in zip(states, Exchange(3)(states, totals), strict=True):
        assert_same(everything(finish(state, sums)[0]), everything(expected), 1e-9, 1e-12)


def test_a_share_without_rows_beside_one_with_rows_is_refused(batches):
    states = [build() for _ in range(2)]
    both = [shares(batches, 2, 2), shares(batches[:1], 2, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    said = Exchange(2)(states, totals)
    assert "this group has rows of one share of the step but none of another" in str(said[0])
    assert said[1] is None
