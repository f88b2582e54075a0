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
from runs import launch
from tensordict import TensorDict

from forgekit.data.batch import shift_labels
from forgekit.data.loader import make_loader
from forgekit.data.order import sample_rows


class Rows:
    """A dataset whose row ``i`` is made of the number ``i``; batched or row by row."""

    def __init__(self, n, seconds=0.0, broken=None):
        self.n, self.seconds, self.broken = n, seconds, broken

    def __len__(self):
        return self.n

    def __getitem__(self, row):
        time.sleep(self.seconds)
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


def test_micro_batches_follow_the_contract():
    """Micro-batch m of R ranks with B rows: samples start + (m*R + r)*B + (0..B-1)."""
    n, b, world, start, seed = 17, 3, 2, 5, 4
    for rank in range(world):
        loader = make_loader(Rows(n), b, seed=seed, start=start, rank=rank, world=world)
        for m, rows in enumerate(take(loader, 12)):
            first = start + (m * world + rank) * b
            assert rows == [int(sample_rows(first + i, n, seed)) for i in range(b)]


@pytest.mark.parametrize("dataset", [Rows(23), BatchedRows(23)])
@pytest.mark.parametrize("epochs", [None, 2])
def test_workers_do_not_change_the_batches_and_resuming_is_skipping(dataset, epochs):
    options = {"batch_size": 4, "seed": 1, "epochs": epochs}
    expected = take(make_loader(dataset, **options), 12)
    for workers in (1, 3):
        with make_loader(dataset, **options, workers=workers) as loader:
            assert take(loader, 12) == expected
        with make_loader(dataset, **options, workers=workers, start=20) as loader:
            assert take(loader, 7) == expected[5:]


@given(
    n=st.integers(1, 40),
    stretches=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4
    ),
)
@settings(max_examples=25, deadline=None)
def test_any_sequence_of_world_sizes_covers_each_sample_once(n, stretches):
    """Stop and resume on other numbers of ranks, rows and micro-batches."""
    start, seen = 0, []
    for world, b, micro_batches in stretches:
        ends = set()
        for rank in range(world):
            loader = make_loader(Rows(n), b, seed=9, start=start, rank=rank, world=world)
            stream = iter(loader)
            seen += [row for _ in range(micro_batches) for row in rows_of(next(stream))]
            ends.add(loader.samples)
        assert ends == {start + world * b * micro_batches}
        start = ends.pop()
    assert sorted(seen) == sorted(sample_rows(range(start), n, 9).tolist())


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_finite_loader_covers_an_epoch_with_padding_that_carries_no_loss(world, workers):
    n, b = 11, 2
    seen, lengths = [], set()
    for rank in range(world):
        loader = make_loader(Rows(n), b, rank=rank, world=world, workers=workers, epochs=1)
        batches = list(loader)
        lengths.add((len(loader), len(batches)))
        assert loader.samples == n
        for batch in batches:
            assert batch.batch_size == torch.Size([b])
            real = batch["labels"][:, 0] != -100
            assert real.equal(batch["doc_ids"][:, 0] != -1)
            seen += batch["input_ids"][real, 0].tolist()
    assert sorted(seen) == list(range(n))
    assert lengths == {(-(-n // (b * world)),) * 2}


def test_samples_count_the_rows_of_all_ranks_without_padding():
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


def test_waiting_is_measured():
    with make_loader(Rows(8, seconds=0.02), 2) as loader:
        take(loader, 2)
        assert 0.08 < loader.wait_seconds < 2
    with make_loader(Rows(8), 2, workers=1) as loader:
        stream = iter(loader)
        next(stream)
        time.sleep(0.3)
        before = loader.wait_seconds
        next(stream)
        assert loader.wait_seconds - before < 0.1


PREAMBLE = """
import torch
from tensordict import TensorDict
from forgekit.data.loader import make_loader
rows = [TensorDict({"input_ids": torch.tensor([i])}) for i in range(8)]
"""


def run_script(code, **environment):
    """Run a script with warnings as errors; return its exit code and all it said on stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


def test_open_loaders_neither_change_the_number_of_threads_nor_spoil_the_exit():
    code = (
        "loaders = [make_loader(rows, 2, workers=2) for _ in range(2)]\n"
        "streams = [iter(loader) for loader in loaders]\n"
        "for stream in streams: next(stream)\n"
        "assert torch.get_num_threads() == 2, torch.get_num_threads()\n"
    )
    assert run_script(code, OMP_NUM_THREADS="2") == (0, "")


def test_an_interrupt_while_waiting_ends_quietly(tmp_path):
    code = (
        "import os, signal, threading, time, warnings\n"
        "warnings.simplefilter('error')\n"
        "class Slow(list):\n"
        "    def __getitem__(self, row):\n"
        "        time.sleep(0.5)\n"
        "        return list.__getitem__(self, row)\n"
        "stream = iter(make_loader(Slow(rows), 1, workers=1))\n"
        "next(stream)\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "next(stream)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + code)
    with launch(script, [], log=tmp_path / "log") as job:
        assert job.end() == -signal.SIGINT
    assert job.output.splitlines()[-1] == "KeyboardInterrupt"
    assert job.output.count("Traceback") == 1


def test_processes_give_the_same_batches_and_the_same_exceptions():
    expected = take(make_loader(Rows(9), 2, seed=2), 3)
    with make_loader(Rows(9), 2, seed=2, workers=1, processes=True) as loader:
        assert take(loader, 3) == expected
    with (
        make_loader(Rows(9, broken=0), 9, workers=1, processes=True) as loader,
        pytest.raises(KeyError) as caught,
    ):
        next(iter(loader))
    assert caught.value.args == ("row is bad", 0)


def test_a_process_that_dies_is_an_error_and_not_a_hang():
    with (
        make_loader(DyingRows(9), 2, workers=1, processes=True) as loader,
        pytest.raises(RuntimeError, match="terminated abruptly"),
    ):
        next(iter(loader))


BAD = {
    "empty": ({"dataset": []}, r"len\(dataset\) 0 must be at least 1"),
    "rows": ({"batch_size": 0}, "batch_size 0 must be at least 1"),
    "start": ({"start": -1}, "start -1 must be at least 0"),
    "epochs": ({"epochs": 0}, "epochs 0 must be at least 1"),
    "rank": ({"rank": 2, "world": 2}, r"rank 2 must lie in range\(world=2\)\. rank, w"),
    "processes": ({"processes": True}, "workers 0 must be at least 1"),
    "ahead": ({"device": "meta", "ahead": -1}, "ahead -1 must be at least 0"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_loader(**{"dataset": Rows(3), **options})


def test_micro_batches_of_a_global_batch_divide_exactly():
    loader = make_loader(Rows(8), batch_size=2, world=3)
    assert loader.micro_batches(12) == 2
    message = r"global_batch_size 9 must be divisible by batch_size 2 \* 3 data-parallel ranks = 6"
    with pytest.raises(ValueError, match=message + "; the nearest are 6 and 12, or batch_size 1."):
        loader.micro_batches(9)
    with pytest.raises(ValueError, match=r"global_batch_size 2 .* the nearest is 6\."):
        loader.micro_batches(2)


# Transforms


def _shift(batch):
    return shift_labels(batch)


def _add_ten(batch):
    return TensorDict({**batch, "input_ids": batch["input_ids"] + 10}, batch.batch_size)


class Unshifted(Rows):
    def __getitem__(self, row):
        return TensorDict({"input_ids": torch.full((4,), row)})


@pytest.mark.parametrize("more", [{}, {"workers": 2}])
def test_transforms_make_micro_batches_in_their_order_and_padding_stays_masked(more):
    order = {"shuffle": False, "epochs": 1, "transforms": (_add_ten, _shift)}
    with make_loader(Unshifted(5), 2, rank=0, world=1, **order, **more) as loader:
        batches = list(loader)
    assert [rows_of(batch) for batch in batches] == [[10, 11], [12, 13], [14, 14]]
    assert [batch["labels"].tolist() for batch in batches[1:]] == [
        [[12] * 3, [13] * 3],
        [[14] * 3, [-100] * 3],
    ]


# Prefetch to a device; "meta" is the one besides the CPU that every machine has


class CountedRows(BatchedRows):
    read = 0

    def __getitems__(self, rows):
        self.read += len(rows)
        return super().__getitems__(rows)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_micro_batches_come_on_the_device_and_count_when_they_are_taken(workers, ahead):
    with make_loader(Rows(40), 2, device="meta", ahead=ahead, workers=workers) as loader:
        for number, batch in enumerate(itertools.islice(loader, 5), start=1):
            assert batch["input_ids"].is_meta
            assert batch.batch_size == (2,)
            assert loader.samples == 2 * number


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_micro_batches_are_ahead_than_asked_for(ahead):
    dataset = CountedRows(100)
    with make_loader(dataset, 2, device="meta", ahead=ahead) as loader:
        batches = iter(loader)
        for number in range(1, 5):
            next(batches)
            time.sleep(0.1)
            assert dataset.read == 2 * (number + ahead)


def test_what_a_reader_ahead_raises_reaches_the_consumer_in_its_turn():
    options = {"shuffle": False, "device": "meta"}
    with make_loader(Rows(10, broken=3), 1, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(KeyError, match="row is bad"):
            next(batches)
    loader = make_loader(Rows(10), 1, device="meta", transforms=[_cannot_move])
    with loader, pytest.raises(RuntimeError, match="this cannot be moved"):
        next(iter(loader))


class _Stuck(TensorDict):
    def to(self, *_, **__):
        raise RuntimeError("this cannot be moved")


def _cannot_move(batch):
    return _Stuck(dict(batch.items()), batch.batch_size)


# Skips


def taken_out(numbers, skips):
    """The oracle: a list, out of which stretches are cut one after the other."""
    numbers = list(numbers)
    for first, rows in skips:
        del numbers[first : first + rows]
    return numbers


ROWS = 24


def samples_of(skips, world, start=0, epochs=None, batch_size=2):
    """Rows with a loss, in the order of their samples."""
    found = {}
    for rank in range(world):
        options = {"start": start, "skip": skips, "rank": rank, "world": world, "epochs": epochs}
        loader = make_loader(Rows(ROWS), batch_size, **options)
        for number, batch in enumerate(itertools.islice(loader, 12)):
            for at, (row, label) in enumerate(
                zip(rows_of(batch), batch["labels"][:, 0].tolist(), strict=True)
            ):
                if label != -100:
                    found[(number * world + rank) * batch_size + at] = row
    return [found[sample] for sample in sorted(found)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 6])
def test_every_number_of_ranks_leaves_out_the_same(world, start):
    skips = [(4, 5), (8, 6)]
    order = samples_of([], 1, batch_size=6)  # three epochs
    expected = taken_out(order, skips)[start:]
    found = samples_of(skips, world, start)
    assert found[: len(expected)] == expected[: len(found)]
    assert len(found) >= 24


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("skips", [[(20, 9)], [(0, 3), (2, 4)], [(30, 2)], [(5, 40)]])
def test_a_loader_with_an_end_has_what_is_left_once(world, skips):
    order = samples_of([], 1, epochs=1)
    assert sorted(order) == list(range(ROWS))
    assert samples_of(skips, world, epochs=1) == taken_out(order, skips)


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
