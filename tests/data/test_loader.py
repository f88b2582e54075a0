"""The loader's order is a contract; its workers change nothing but speed and leave no trace."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forgekit.data.batch import shift_labels
from forgekit.data.loader import make_loader
from forgekit.data.order import sample_rows


class Rows:
    """A dataset whose row ``i`` is made of the number ``i``; batched or row by row."""

    def __init__(self, n, broken=None):
        self.n, self.broken = n, broken

    def __len__(self):
        return self.n

    def __getitem__(self, row):
        if row == self.broken:
            raise KeyError("row is bad", row)
        ids = torch.full((3,), row)
        return TensorDict({"input_ids": ids, "labels": ids, "doc_ids": ids * 0})


class BatchedRows(Rows):
    def __getitems__(self, rows):
        ids = torch.tensor(rows)[:, None].expand(-1, 3).clone()
        return TensorDict({"input_ids": ids, "labels": ids + 1000}, batch_size=[len(rows)])


class DyingRows(Rows):
    def __getitem__(self, row):
        os._exit(1)


def rows_of(batch):
    return batch["input_ids"][:, 0].tolist()


def take(loader, count):
    return [rows_of(batch) for batch in itertools.islice(loader, count)]


@pytest.mark.parametrize("dataset", [Rows(23), BatchedRows(23)])
@pytest.mark.parametrize("epochs", [None, 2])
def test_workers_do_not_change_the_batches_and_resuming_is_skipping(dataset, epochs):
    options = {"batch_size": 4, "seed": 1, "epochs": epochs}
    expected = take(make_loader(dataset, **options), 12)
    with make_loader(dataset, **options, workers=3) as loader:
        assert take(loader, 12) == expected
    with make_loader(dataset, **options, workers=1, start=20) as loader:
        assert take(loader, 7) == expected[5:]


@given(
    n=st.integers(1, 40),
    stretches=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4
    ),
)
@settings(max_examples=25, deadline=None)
def test_any_sequence_of_world_sizes_covers_each_sample_once(n, stretches):
    """Micro-batch m of R ranks with B rows: samples start + (m*R + r)*B + (0..B-1)."""
    start = 0
    for world, b, micro_batches in stretches:
        for rank in range(world):
            loader = make_loader(Rows(n), b, seed=9, start=start, rank=rank, world=world)
            for m, rows in enumerate(take(loader, micro_batches)):
                first = start + (m * world + rank) * b
                assert rows == sample_rows(range(first, first + b), n, 9).tolist()
            assert loader.samples == start + world * b * micro_batches
        start = loader.samples


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (5, 0), (2, 2)])
def test_a_finite_loader_covers_an_epoch_with_padding_that_carries_no_loss(world, workers):
    n, b = 11, 2
    seen, lengths = [], set()
    for rank in range(world):
        loader = make_loader(Rows(n), b, rank=rank, world=world, workers=workers, epochs=1)
        batches = list(loader)
        lengths.add((len(loader), len(batches)))
        assert loader.samples == n
        for batch in batches:
            real = batch["labels"][:, 0] != -100
            assert real.equal(batch["doc_ids"][:, 0] != -1)
            seen += batch["input_ids"][real, 0].tolist()
    assert sorted(seen) == list(range(n))
    assert lengths == {(-(-n // (b * world)),) * 2}
    loader = make_loader(Rows(11), 2, rank=1, world=2, start=3, epochs=1)
    assert (loader.samples, len(loader)) == (3, 2)
    assert [loader.samples for _ in loader] == [7, 11]
    assert list(make_loader(Rows(11), 2, start=11, epochs=1)) == []


def test_a_finite_loader_starts_anew_and_an_endless_one_goes_on():
    finite = make_loader(Rows(6), 2, epochs=1, workers=1)
    endless = make_loader(Rows(6), 2, workers=1)
    assert take(finite, 9) == take(finite, 9) == take(endless, 3)
    assert (finite.samples, endless.samples) == (6, 6)
    endless.close()
    assert take(endless, 4) == take(make_loader(Rows(6), 2, start=6), 4)
    assert endless.samples == 14
    endless.close()


def test_two_loops_over_one_finite_loader_are_refused():
    loader = make_loader(Rows(6), 2, epochs=1)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(RuntimeError, match=r"started again while an earlier loop .* Make a loader"):
        next(first)


def test_threads_end_with_the_loop_with_close_and_with_the_loader():
    before = set(threading.enumerate())
    list(make_loader(Rows(6), 2, epochs=1, workers=3))
    assert set(threading.enumerate()) <= before  # those of before may be ending
    with make_loader(Rows(6), 2, workers=3) as loader:
        next(iter(loader))
        assert len(set(threading.enumerate()) - before) >= 3
    assert set(threading.enumerate()) <= before
    next(iter(loader))
    assert set(threading.enumerate()) - before
    del loader
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_reaches_the_consumer_as_it_is_and_can_be_retried(workers):
    before = set(threading.enumerate())
    dataset = Rows(8, broken=5)
    loader = make_loader(dataset, 2, workers=workers, shuffle=False)
    stream = iter(loader)
    assert [rows_of(next(stream)) for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError) as caught:
        next(stream)
    assert caught.value.args == ("row is bad", 5)
    assert set(threading.enumerate()) <= before
    dataset.broken = None
    assert take(loader, 1) == [[4, 5]]
    loader.close()


SCRIPT = """
import os, signal, threading, time
import torch
from tensordict import TensorDict
from forgekit.data.loader import make_loader

class Slow(list):
    def __getitem__(self, row):
        time.sleep(0.5)
        return list.__getitem__(self, row)

rows = [TensorDict({"input_ids": torch.tensor([i])}) for i in range(8)]
loaders = [make_loader(rows, 2, workers=2), make_loader(Slow(rows), 1, workers=1)]
streams = [iter(loader) for loader in loaders]
for stream in streams:
    next(stream)
assert torch.get_num_threads() == 2, torch.get_num_threads()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
next(streams[1])
"""


def test_open_loaders_leave_the_threads_of_torch_and_an_interrupt_ends_them_quietly():
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1


def test_processes_give_the_same_batches_and_exceptions_and_one_that_dies_is_no_hang():
    expected = take(make_loader(Rows(9), 2, seed=2), 3)
    with make_loader(Rows(9), 2, seed=2, workers=1, processes=True) as loader:
        assert take(loader, 3) == expected
    for rows, error, message in (
        (Rows(9, broken=0), KeyError, "row is bad.*0"),
        (DyingRows(9), RuntimeError, "terminated abruptly"),
    ):
        with (
            make_loader(rows, 9, workers=1, processes=True) as loader,
            pytest.raises(error, match=message),
        ):
            next(iter(loader))


BAD = {
    r"len\(dataset\) 0 must be at least 1": {"dataset": []},
    "batch_size 0 must be at least 1": {"batch_size": 0},
    "start -1 must be at least 0": {"start": -1},
    "epochs 0 must be at least 1": {"epochs": 0},
    r"rank 2 must lie in range\(world=2\)\. rank, w": {"rank": 2, "world": 2},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError, match=message):
        next(iter(make_loader(**{"dataset": Rows(3), **BAD[message]})))


def test_micro_batches_of_a_global_batch_divide_exactly():
    loader = make_loader(Rows(8), batch_size=2, world=3)
    assert loader.micro_batches(12) == 2
    message = r"global_batch_size 9 must be divisible by batch_size 2 \* 3 data-parallel ranks = 6"
    with pytest.raises(ValueError, match=message + "; the nearest are 6 and 12, or batch_size 1."):
        loader.micro_batches(9)


# Transforms


def _add_ten(batch):
    return batch.set("input_ids", batch["input_ids"] + 10)


class Unshifted(Rows):
    def __getitem__(self, row):
        return TensorDict({"input_ids": torch.full((4,), row)})


def test_transforms_make_micro_batches_in_their_order_and_padding_stays_masked():
    transforms = (_add_ten, shift_labels)
    batches = list(
        make_loader(Unshifted(5), 2, shuffle=False, epochs=1, transforms=transforms, workers=2)
    )
    assert [rows_of(batch) for batch in batches] == [[10, 11], [12, 13], [14, 14]]
    assert [batch["labels"].tolist() for batch in batches[1:]] == [
        [[12] * 3, [13] * 3],
        [[14] * 3, [-100] * 3],
    ]


# Prefetch to a device; "meta" is the one besides the CPU that every machine has


class CountedRows(Rows):
    read = 0

    def __getitem__(self, row):
        self.read += 1
        return super().__getitem__(row)


@pytest.mark.parametrize("ahead", [0, 3])
def test_micro_batches_come_on_the_device_and_no_more_are_ahead_than_asked_for(ahead):
    dataset = CountedRows(100)
    with make_loader(dataset, 2, device="meta", ahead=ahead) as loader:
        batches = iter(loader)
        for number in range(1, 3):
            batch = next(batches)
            assert batch["input_ids"].is_meta
            assert (batch.batch_size, loader.samples) == ((2,), 2 * number)
            time.sleep(0.1)
            assert dataset.read == 2 * (number + ahead)


def test_what_a_reader_ahead_raises_reaches_the_consumer_in_its_turn():
    with make_loader(Rows(10, broken=3), 1, shuffle=False, device="meta") as loader:
        assert len(list(itertools.islice(loader, 3))) == 3
        with pytest.raises(KeyError, match="row is bad"):
            next(iter(loader))


# Skips


ROWS = 24


def samples_of(skips, world, batch_size=2):
    """Rows with a loss, in the order of their samples."""
    seen = {}
    for rank in range(world):
        options = {"skip": skips, "rank": rank, "world": world, "epochs": 1}
        loader = make_loader(Rows(ROWS), batch_size, **options)
        for number, batch in enumerate(loader):
            real = batch["labels"][:, 0] != -100  # padding comes last
            first = (number * world + rank) * batch_size
            seen |= dict(enumerate(batch["input_ids"][real, 0].tolist(), start=first))
    return [seen[sample] for sample in sorted(seen)]


@pytest.mark.parametrize("skips", [[(20, 9)], [(0, 3), (2, 4)], [(30, 2)], [(5, 40)]])
def test_a_loader_with_an_end_has_what_is_left_once(skips):
    order = samples_of([], 1)
    assert sorted(order) == list(range(ROWS))
    left = list(order)
    for first, rows in skips:
        del left[first : first + rows]
    for world in (1, 2):
        assert samples_of(skips, world) == left


def test_a_loop_goes_on_from_where_the_loader_was_sent():
    loader, seen = make_loader(Rows(ROWS), 2, shuffle=False, workers=1), []
    for batch in loader:
        seen += rows_of(batch)
        if loader.samples == 6 and len(seen) == 6:
            loader.seek(2, skip=[(4, 4)])
        if len(seen) == 14:
            break
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3, 8, 9, 10, 11, 12, 13]
    assert loader.samples == 10
    assert loader.locate(2, 6) == [(None, 2), (None, 3), (None, 8), (None, 9)]
    loader.close()
