"""Batch size and length change at a sample: each token once, whole steps, the rate with them."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import attrs
import numpy as np
import pytest
import torch
from lab import SPEC, full, lay_out
from pool import run_again
from torch import nn

import forgekit as fk
from forgekit.data import SizePhase, make_sizes, vary_length
from forgekit.run.setup import check_length

TOKENS = 333
"""Of 11 windows of 32 the last has 12 targets."""
PHASES = (
    SizePhase(16, global_batch_size=16),
    SizePhase(64, global_batch_size=8, seq_len=8),
    SizePhase(84, lr_scale=0.5, global_batch_size=8, seq_len=8),
    SizePhase(96, global_batch_size=4, seq_len=32),
)
SIZES = make_sizes(8, 4, PHASES)
STEPS = [(8, 4)] * 2 + [(16, 4)] * 3 + [(8, 8)] * 4 + [(4, 32)] * 5
"""Rows and length of each."""
STARTS = [sum(rows for rows, _ in STEPS[:step]) for step in range(len(STEPS) + 1)]


def write(path, documents=((0, TOKENS - 1),)):
    """A token file of documents of consecutive ids; by default each token is its own position."""
    ids = [np.arange(*ends) for ends in documents]
    return fk.write_tokens(path, ids, vocab_size=TOKENS, eos_id=TOKENS - 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sizes") / "tokens")


def dataset_of(file, sizes=SIZES, seed=3, **options):
    return vary_length(fk.token_dataset(file, sizes.seq_lens[0], **options), sizes, seed)


def loader_of(dataset, sizes=SIZES, world=1, **options):
    rows = [max(1, n // (2 * world)) for n in sizes.global_batch_sizes]
    return fk.make_loader(dataset, rows, sizes=sizes, world=world, seed=9, **options)


def ids_of(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


@pytest.mark.parametrize("doc_ids", [False, True])
@pytest.mark.parametrize(
    "phases",
    [
        PHASES,
        [SizePhase(8, seq_len=16), SizePhase(208, seq_len=8), SizePhase(408, seq_len=16)],
        [SizePhase(0, seq_len=32), SizePhase(24)],  # from long rows to short ones, after two epochs
        [SizePhase(24, seq_len=12), SizePhase(96, seq_len=6)],  # neither divides the other
    ],
)
def test_each_token_is_a_target_once_in_each_epoch_whatever_the_phases(tmp_path, phases, doc_ids):
    file = write(tmp_path / "tokens", [(0, 50), (0, 1), (20, 300)])
    sizes = make_sizes(8, 4, phases)
    longest = max(sizes.seq_lens)
    windows = -(-(file.tokens - 1) // longest)
    dataset, sample, seen = dataset_of(file, sizes, doc_ids=doc_ids), 0, Counter()
    for epoch in range(1, 6):
        while sizes.positions(sample) < epoch * windows * longest:
            seen.update(dataset[sample]["labels"].tolist())
            sample += 1
        del seen[-100]
        assert seen == Counter(file.read(1, file.tokens).tolist() * epoch)


def test_rows_of_a_phase_are_shuffled_within_what_it_reads(file):
    """Pieces of all its windows, in another way under each seed."""
    sizes = make_sizes(8, 4, [SizePhase(40, seq_len=32)])
    orders = []
    for seed in (3, 4):
        ids = dataset_of(file, sizes, seed).__getitems__(range(40))["input_ids"][:, 0]
        assert [*Counter((ids // 32).tolist()).values()] == [8] * 5
        assert int((ids.diff() == 4).sum()) < 8
        orders.append(ids)
    assert not orders[0].equal(orders[1])


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (4, 1)])
def test_steps_have_the_sizes_of_their_phase_from_any_of_them_on_and_on_any_ranks(
    file, world, workers
):
    dataset = dataset_of(file)
    for first in (0, 1, 4, 5, 8, 12):
        loaders = [
            loader_of(dataset, world=world, rank=rank, start=STARTS[first], workers=workers)
            for rank in range(world)
        ]
        steps = zip(*map(fk.groups, loaders), strict=True)
        for number, ranks in enumerate(islice(steps, len(STEPS) - first), first):
            ids = torch.cat([*map(ids_of, ranks)])
            expected = dataset.__getitems__(range(STARTS[number], STARTS[number + 1]))
            assert tuple(ids.shape) == STEPS[number]
            assert sorted(ids.tolist()) == sorted(expected["input_ids"].tolist())
        for loader in loaders:
            assert loader.samples == STARTS[-1]
            loader.close()


def test_a_step_that_is_left_unused_and_a_skip_leave_the_next_ones_whole(file):
    with loader_of(dataset_of(file), workers=1) as loader:
        groups = fk.groups(loader)
        unused = [len(next(groups)) for _ in range(3)]
        assert (unused, loader.samples) == ([2, 2, 2], STARTS[2])
        list(next(groups))
        assert loader.samples == STARTS[4]
        # As after a roll-back: the steps 4 and 5, on both sides of a change, are left out.
        loader.seek(STARTS[3], skip=[(STARTS[4], 16 + 8)])
        shapes = [tuple(ids_of(group).shape) for group in islice(groups, 5)]
        assert (shapes, loader.samples) == ([STEPS[3], *STEPS[6:10]], STARTS[10] - 24)


def test_the_batch_size_alone_changes_no_row(file):
    sizes = make_sizes(8, 4, [SizePhase(16, global_batch_size=4)])
    rows = fk.token_dataset(file, 4)
    assert vary_length(rows, sizes) is rows
    loaders = fk.make_loader(rows, 2, seed=9), fk.make_loader(rows, [2, 1], sizes=sizes, seed=9)
    plain, changed = (ids_of(islice(loader, 16)) for loader in loaders)
    assert plain[:24].equal(changed)


def test_what_has_not_begun_may_still_change_but_for_the_end_of_the_phase(file):
    later = SizePhase(104, global_batch_size=4, seq_len=32)
    moved = dataset_of(file, make_sizes(8, 4, (*PHASES[:3], later)))
    before, after = (one.fingerprint_at for one in (dataset_of(file), moved))
    assert (before(16), before(64)) == (after(16), after(64))
    assert before(65) != after(65)
    assert dataset_of(file).fingerprint_at(1) != dataset_of(file, seed=4).fingerprint_at(1)


def test_the_rate_follows_the_positions_up_to_the_sample():
    schedule = fk.with_phases(fk.optim.linear(1.0, 60), PHASES, SIZES)
    ends = [sum(rows * length for rows, length in STEPS[: step + 1]) for step in range(len(STEPS))]
    scales = [0.5 if 84 < end <= 96 else 1.0 for end in STARTS[1:]]
    expected = [(1 - (end / 32 - 1) / 60) * s for end, s in zip(ends, scales, strict=True)]
    assert [schedule(step) for step in range(len(STEPS))] == pytest.approx(expected)
    assert [schedule(99, end=end) for end in STARTS[1:]] == pytest.approx(expected)
    plain = fk.optim.linear(1.0, 60)
    assert (schedule(0), schedule(1)) == (plain(0), plain(1))


REFUSED = [
    ((SizePhase(64, seq_len=8), SizePhase(32)), "sample 32 follows one at sample 64"),
    ((SizePhase(20, global_batch_size=16),), "nearest are 16 and 24. Move"),
    ((SizePhase(16, global_batch_size=3), SizePhase(20)), "nearest are 3 and 6. Move"),
    ((SizePhase(8, seq_len=64),), "nearest is 16. Move"),
    ((SizePhase(64, seq_len=6),), "seq_len 4 must divide the longest one, 6"),
]


@pytest.mark.parametrize(("phases", "message"), REFUSED)
def test_phases_that_cannot_be_are_named(phases, message):
    with pytest.raises(ValueError, match=message):
        make_sizes(8, 4, phases)


def test_a_loader_refuses_what_would_train_on_other_rows(file):
    dataset = dataset_of(file)
    with pytest.raises(ValueError, match=r"rows of the data have \[4\] positions"):
        loader_of(fk.token_dataset(file, 4))
    with pytest.raises(ValueError, match="8 must be divisible by batch_size 4 \\* 3"):
        fk.make_loader(dataset, [4, 8, 4, 4], sizes=SIZES, world=3)
    with pytest.raises(ValueError, match=r"sample 4 .*12 rows.*nearest are 8 and 16"):
        loader_of(dataset, start=4)
    with pytest.raises(ValueError, match="epochs"):
        loader_of(fk.token_dataset(file, 4), make_sizes(8, 4), epochs=1)
    with loader_of(dataset) as loader, pytest.raises(ValueError, match=r"use groups\(loader\)"):
        loader.micro_batches(8)
    with pytest.raises(ValueError, match="packed documents"):
        vary_length(fk.packed_dataset(file, fk.pack(np.diff(file.offsets), 4)), SIZES)


def refuse_length(_rank, _world, path):
    """A later phase's rows of 6 cannot be shared by two ranks in a ring, which take 4 chunks."""
    model = fk.Transformer(attrs.evolve(SPEC, vocab_size=TOKENS, max_seq_len=12))
    state = lay_out(model, {"cp": 2})
    dataset = dataset_of(path, make_sizes(8, 12, [SizePhase(8, seq_len=6), SizePhase(16)]))
    with pytest.raises(ValueError, match=r"sequence length 6 must be a multiple of 4"):
        check_length(state, dataset)
    fitting = make_sizes(8, 12, [SizePhase(8, seq_len=4), SizePhase(32)])
    check_length(state, dataset_of(path, fitting))


def test_a_length_that_a_layout_cannot_share_is_named_before_the_first_step(file):
    run_again(refuse_length, 2, file.path)


class Scores(nn.Module):
    """A number for each token. Its gradient is a count, so it is exact in any layout."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids):
        return self.table(ids)


def score_loss(model, batch):
    is_target = batch["labels"] != -100
    scores = model(batch["labels"].clamp(min=0))[..., 0]
    return fk.Loss((scores * is_target).sum(), is_target.sum())


def train(_rank, _world, path, out, steps):
    """Go on to some step, save it there, and return the table."""
    state = lay_out(Scores(), build=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3))
    state = fk.donate(state, seed=3)
    dataset = dataset_of(path)
    state = fk.checkpoint_load(state, out, fingerprint=dataset.fingerprint_at)
    rate = fk.with_phases(fk.optim.linear(1.0, 60), PHASES, SIZES)
    step = fk.make_step(score_loss, schedule=rate, max_norm=float("inf"))
    world = fk.data_ranks(state.mesh)[1]
    with fk.train_loader(state, dataset, 4 // world, sizes=SIZES, workers=1) as loader:
        for batches in fk.groups(loader):
            if state.step == steps:
                break
            state, _ = step(state, batches)
    fk.checkpoint_save(state, out, blocking=True, fingerprint=dataset.fingerprint_at)
    (table,) = state.model.parameters()
    return full(table).detach().tolist(), state.samples


def test_a_run_through_phases_moves_between_ranks_and_trains_the_same_bits(file, tmp_path):
    """Two changes of the batch size, two of the length; stops within each phase but one."""
    whole = run_again(train, 1, file.path, tmp_path / "whole", len(STEPS))[0]
    for world, steps in ((2, 1), (4, 4), (1, 7), (2, 10), (4, len(STEPS))):
        moved = run_again(train, world, file.path, tmp_path / "moved", steps)
    assert ([*moved], whole[1]) == ([whole] * 4, STARTS[-1])
