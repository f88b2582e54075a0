"""The sum over replica groups and the vote, without torchft: groups in threads of one process.

What a group is told by its neighbours comes from threads here; `tests/run/test_replica_groups.py`
has processes that torchft keeps track of.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import attrs
import pytest
import torch
from lab import SPEC, full, global_batch, logits_loss, reference_gradients, relative_error
from ranks import run_again

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


def build(layout=None, *, optimizer=fk.adamw, spec=EVEN):
    model, mesh = fk.Transformer(spec).double(), None
    if layout:
        mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
        model = fk.parallelize(model, mesh)
    return fk.TrainState.create(model, optimizer(model), mesh=mesh, average=fk.EMA(0.9))


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


def parameters_of(state):
    return {n: full(p).detach().clone() for n, p in state.model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def _gradients(rank, world, layout, groups, kind):
    states = [build(layout) for _ in range(groups)]
    reader, readers = fk.data_ranks(states[0].mesh)
    everybody = global_batch(readers, kind)
    batches = [row[reader] for row in everybody]
    if layout.get("pp", 1) > 1 or layout.get("tp", 1) > 1:  # of one shape, which two can share
        everybody = [global_batch(readers, kind, seed=seed)[1] for seed in range(4)]
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


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("groups", [2, 5])
def test_gradients_of_groups_are_those_of_one_process(layout, groups):
    """Of five groups two have no row; counts of targets are ragged."""
    run_again(_gradients, 2, layout, groups, "ragged")


def test_a_group_without_targets_adds_nothing():
    run_again(_gradients, 2, {"dp_shard": 2}, 3, "empty_micro_batches")


def test_a_group_without_rows_has_a_vote(batches):
    """Of five groups two have no micro-batch; one of them is asked to stop."""
    states = [build() for _ in range(5)]
    parts = shares(batches, 5, 2)
    assert parts[0].samples == 0
    totals = [fk.accumulate(s, part, logits_loss) for s, part in zip(states, parts, strict=True)]
    votes = [torch.full_like(totals[0]["loss"], vote) for vote in (1.0, 0.0, 0.0, 0.0, 0.0)]
    totals = [one.plus(stop=vote) for one, vote in zip(totals, votes, strict=True)]
    for sums in Exchange(5)(states, totals):
        assert float(sums["stop"]) == 1.0


@pytest.fixture
def batches():
    return [row[0] for row in global_batch(1)]


def step_of(states, batches, exchange, loss_fn=logits_loss):
    parts = shares(batches, len(states), 2)
    totals = [fk.accumulate(s, part, loss_fn) for s, part in zip(states, parts, strict=True)]
    return exchange(states, totals)


def test_dropout_does_not_depend_on_who_computes_a_micro_batch(batches):
    spec = attrs.evolve(EVEN, dropout=0.5)
    alone = build(spec=spec)
    alone, _, _ = finish(alone, fk.accumulate(alone, batches, logits_loss))
    states = [build(spec=spec) for _ in range(3)]
    for state, totals in zip(states, step_of(states, batches, Exchange(3)), strict=True):
        new, _, _ = finish(state, totals)
        for name, p in new.model.named_parameters():
            expected = dict(alone.model.named_parameters())[name]
            torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("groups", [2, 5])
def test_experts_are_counted_once(batches, groups):
    """A group without rows computes a micro-batch of another; its routers must not count."""
    spec = attrs.evolve(EVEN, moe=EXPERTS)
    alone = build(spec=spec)
    alone, expected, _ = finish(alone, fk.accumulate(alone, batches, logits_loss))
    states = [build(spec=spec) for _ in range(groups)]
    for state, totals in zip(states, step_of(states, batches, Exchange(groups)), strict=True):
        new, reduced, _ = finish(state, totals)
        torch.testing.assert_close(reduced["experts", "counts"], expected["experts", "counts"])
        for name, value in new.model.state_dict().items():
            whole = alone.model.state_dict()[name]
            torch.testing.assert_close(value, whole, rtol=1e-9, atol=1e-12, msg=name)


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
        changed = {"step", "samples", "skipped"}
        now = {n: v for n, v in everything(new).items() if n not in changed}
        assert_same(now, {n: v for n, v in before[index].items() if n not in changed})


def _half(rank, world, groups):
    """Steps in float16 from a scale that is too large for some of the groups, then for none."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    batches = [row[rank] for row in global_batch(world)]
    states = []
    for _ in range(groups):
        model = fk.parallelize(fk.Transformer(EVEN), mesh, precision="fp16")
        states.append(fk.TrainState.create(model, fk.adamw(model), mesh=mesh, loss_scale=2.0**18))
    scales, finite, exchange = [], False, Exchange(groups)
    while not finite:
        parts = shares(batches, groups, 2 * world)
        totals = [fk.accumulate(s, p, logits_loss) for s, p in zip(states, parts, strict=True)]
        scales.append(states[0].loss_scale.log2().item())
        summed = [
            fk.reduce_totals(t, s) for t, s in zip(exchange(states, totals), states, strict=True)
        ]
        found = [fk.gradients(s, t) for s, t in zip(states, summed, strict=True)]
        found = [{name: full(g) for name, g in each.items()} for each in found]
        corrections = [fk.clip(t, 1.0) for t in summed]
        finite = bool(corrections[0].finite)
        everyone = zip(states, corrections, summed, strict=True)
        states = [fk.update(s, c, lr=0.01, totals=t) for s, c, t in everyone]
        for state in states[1:]:
            assert state.loss_scale == states[0].loss_scale
            assert_same(parameters_of(state), parameters_of(states[0]))
    expected, _ = reference_gradients(fk.Transformer(EVEN), global_batch(world))
    assert all(relative_error(each, expected) < 3e-3 for each in found)
    return scales


def test_groups_in_float16_overflow_together_and_have_one_scale():
    for scales in run_again(_half, 2, 3):
        assert scales == [18.0 - step for step in range(len(scales))]
        assert 3 < len(scales) < 20


def trained(groups, batches, steps=1):
    states = [build() for _ in range(groups)]
    for _ in range(steps):
        totals = step_of(states, batches, Exchange(groups))
        states = [finish(s, t)[0] for s, t in zip(states, totals, strict=True)]
    return states


def test_a_step_that_breaks_off_changes_nothing_and_comes_again_in_other_parts(batches):
    """Group 1 loses the others in the midst of a step; two groups do it again."""
    states = trained(3, batches)
    expected, _, _ = finish(
        copied := trained(1, batches)[0], fk.accumulate(copied, batches, logits_loss)
    )
    before = [everything(state) for state in states]
    exchange = Exchange(3)
    exchange.fails = {0, 1, 2}
    assert step_of(states, batches, exchange) == [None] * 3
    for state, was in zip(states, before, strict=True):
        assert_same(everything(state), was)
    survivors = states[::2]
    for state, totals in zip(survivors, step_of(survivors, batches, Exchange(2)), strict=True):
        new, _, _ = finish(state, totals)
        for name, value in everything(new).items():
            torch.testing.assert_close(value, everything(expected)[name], rtol=1e-9, atol=1e-12)


def test_a_group_that_fails_alone_votes_alone(batches):
    """Those that have all sums commit; the other is behind, and is given their state."""
    states, exchange = trained(2, batches), Exchange(2)
    exchange.fails = {1}
    first, second = step_of(states, batches, exchange)
    assert first is not None
    assert second is None
    assert exchange.votes == [True, False]


def test_a_newcomer_with_other_sums_is_refused_and_the_others_go_on(batches):
    states = [trained(1, batches)[0], build()]
    states[1] = fk.donate(states[1], step=1, samples=6)  # as one that was given the state

    def named(model, batch):
        return logits_loss(model, batch).with_metrics(other=(1.0, 1))

    parts = shares(batches, 2, 2)
    totals = [
        fk.accumulate(state, part, loss_fn)
        for state, part, loss_fn in zip(states, parts, (logits_loss, named), strict=True)
    ]
    first, second = Exchange(2)(states, totals)
    assert first is None
    assert isinstance(second, ValueError)
    assert "adds up something else than the others" in str(second)
    assert "('metrics', 'other', 'sum')" in str(second)


@pytest.mark.parametrize("whole", [(6, 2), (3, 4)], ids=["global batch", "rows"])
def test_a_newcomer_with_other_sizes_is_refused_and_the_others_go_on(batches, whole):
    """Parts of steps of different sizes would leave rows out, or have them twice."""
    states = [trained(1, batches)[0], build()]
    states[1] = fk.donate(states[1], step=1, samples=6)
    parts = shares(batches, 2, 2)
    parts[1].whole = whole
    totals = [fk.accumulate(s, p, logits_loss) for s, p in zip(states, parts, strict=True)]
    first, second = Exchange(2)(states, totals)
    assert first is None
    assert isinstance(second, ValueError)
    assert f"of steps of [{whole}] (micro-batches, rows in each)" in str(second)


def test_groups_at_other_samples_do_not_add_up(batches):
    """None of them has just joined, so nobody can tell who is wrong: all end."""
    states = trained(2, batches)
    states[1] = fk.donate(states[1], samples=99)
    for said in step_of(states, batches, Exchange(2)):
        assert "adds up something else than the others" in str(said)


def test_names_of_sums_that_change_are_named(batches):
    """A metric that the rows of one group have and those of another have not."""
    states = trained(2, batches)

    def sometimes(model, batch):
        loss = logits_loss(model, batch)
        is_first = torch.equal(batch["input_ids"], batches[0]["input_ids"])
        return loss.with_metrics(other=(1.0, 1)) if is_first else loss

    first, second = step_of(states, batches, Exchange(2), sometimes)
    assert "new ['metrics.other.count', 'metrics.other.sum']" in str(first)
    assert second is None


def test_totals_are_summed_once(batches):
    state = build()
    totals = fk.accumulate(state, batches, logits_loss)
    summed = fk.sum_replicas(totals, state, fk.OneGroup())
    for again in (summed, fk.reduce_totals(totals, state)):
        with pytest.raises(ValueError, match=r"have been summed before\. sum_replicas comes once"):
            fk.sum_replicas(again, state, fk.OneGroup())
    with pytest.raises(ValueError, match="onto: the gradients that belong to these totals are"):
        fk.accumulate(state, batches, logits_loss, onto=summed)
    held_back = fk.accumulate(state, batches, logits_loss, more=True)
    with pytest.raises(ValueError, match="the last call of accumulate had more=True"):
        fk.sum_replicas(held_back, state, fk.OneGroup())


def added(state, *parts):
    """What two calls of accumulate leave, the second going on from the first."""
    first, second = parts
    totals = fk.accumulate(state, first, logits_loss, more=True)
    return fk.accumulate(state, second, logits_loss, onto=totals)


def test_calls_that_go_on_from_each_other_add_up(batches):
    alone, states = build(), [build() for _ in range(3)]
    both = [shares(batches, 3, 2), shares(batches[::-1], 3, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    expected, _, _ = finish(alone, added(alone, batches, batches[::-1]))
    for state, sums in zip(states, Exchange(3)(states, totals), strict=True):
        new, _, _ = finish(state, sums)
        assert new.samples == 12
        for name, value in everything(new).items():
            torch.testing.assert_close(value, everything(expected)[name], rtol=1e-9, atol=1e-12)


def test_a_share_without_rows_beside_one_with_rows_is_refused(batches):
    states = [build() for _ in range(2)]
    both = [shares(batches, 2, 2), shares(batches[:1], 2, 2)]
    totals = [added(*each) for each in zip(states, *both, strict=True)]
    said = Exchange(2)(states, totals)
    assert "this group has rows of one share of the step and none of another" in str(said[0])
    assert said[1] is None


def test_a_layer_that_one_group_skips_and_frozen_parameters(batches):
    """What a group did not use is zero there; what no group trains has no gradient to add."""

    def skips(model, batch):
        is_first = torch.equal(batch["input_ids"], batches[0]["input_ids"])
        kept = model.layers
        model.layers = kept[:1] if is_first else kept
        try:
            return logits_loss(model, batch)
        finally:
            model.layers = kept

    def made():
        model = fk.add_lora(fk.Transformer(EVEN), rank=2).double()
        return fk.TrainState.create(model, fk.adamw(model), average=fk.EMA(0.9))

    alone, states = made(), [made() for _ in range(3)]
    expected, _, _ = finish(alone, fk.accumulate(alone, batches, skips))
    for state, totals in zip(states, step_of(states, batches, Exchange(3), skips), strict=True):
        new, _, _ = finish(state, totals)
        for name, value in everything(new).items():
            torch.testing.assert_close(value, everything(expected)[name], rtol=1e-9, atol=1e-12)


def test_a_loss_of_one_group_that_cannot_be_trained_on_is_trained_on_by_none(batches):
    states = trained(2, batches)
    totals = [
        fk.accumulate(s, p, logits_loss) for s, p in zip(states, shares(batches, 2, 2), strict=True)
    ]
    totals[1] = attrs.evolve(totals[1], problem="a loss of means only")
    first, second = Exchange(2)(states, totals)
    assert first is None
    assert isinstance(second, ValueError)
    assert "a loss of means only" in str(second)


def test_one_group_alone_is_a_step_as_ever(batches):
    states = [build(), build()]
    totals = [fk.accumulate(state, batches, logits_loss) for state in states]
    totals[1] = fk.sum_replicas(totals[1], states[1], fk.OneGroup())
    first, second = (finish(s, t)[0] for s, t in zip(states, totals, strict=True))
    assert_same(everything(second), everything(first))
