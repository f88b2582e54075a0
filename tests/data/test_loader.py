"""The loader's order is a contract; its workers change nothing but speed and leave no trace."""

from __future__ import annotations

import itertools
import signal
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import launch
from tensordict import TensorDict

from forgekit.data.loader import make_loader
from forgekit.data.order import sample_rows


class Rows:
    """A dataset whose row ``i`` is made of the number ``i``; notes what is read."""

    def __init__(self, n, broken=None):
        self.n, self.broken, self.read = n, broken, []

    def __len__(self):
        return self.n

    def __getitem__(self, row):
        if row == self.broken:
            raise KeyError("row is bad", row)
        self.read.append(row)
        ids = torch.full((3,), row)
        return TensorDict({"input_ids": ids, "labels": ids, "doc_ids": ids * 0})


def rows_of(batch):
    return batch["input_ids"][:, 0].tolist()


def take(loader, count):
    return [rows_of(batch) for batch in itertools.islice(loader, count)]


@pytest.mark.parametrize("epochs", [None, 2])
def test_workers_do_not_change_the_batches_and_resuming_is_skipping(epochs):
    options = {"dataset": Rows(23), "batch_size": 4, "seed": 1, "epochs": epochs}
    expected = take(make_loader(**options), 12)
    with make_loader(**options, workers=3) as loader:
        assert take(loader, 12) == expected
    with make_loader(**options, workers=1, start=20) as loader:
        assert take(loader, 7) == expected[5:]


@given(
    n=st.integers(1, 40),
    stretches=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4
    ),
)
@settings(max_examples=15, deadline=None)
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


def trained_rows(batch):
    is_real = batch["labels"][:, 0] != -100
    assert is_real.equal(batch["doc_ids"][:, 0] != -1)
    return batch["input_ids"][is_real, 0].tolist()


@pytest.mark.parametrize("skips", [[], [(20, 9)], [(0, 3), (2, 4)], [(5, 40)]])
@pytest.mark.parametrize(("world", "workers"), [(5, 0), (2, 2)])
def test_a_loader_with_an_end_has_what_is_left_once_and_padding_carries_no_loss(
    skips, world, workers
):
    left = sample_rows(range(24), 24, 0).tolist()
    for first, rows in skips:
        del left[first : first + rows]
    for rank in range(world):
        options = {"skip": skips, "rank": rank, "world": world, "epochs": 1, "workers": workers}
        loader = make_loader(Rows(24), 2, **options)
        starts = [2 * (m * world + rank) for m in range(-(-len(left) // (2 * world)))]
        assert list(map(trained_rows, loader)) == [left[at : at + 2] for at in starts]
        assert (len(loader), loader.samples) == (len(starts), len(left))


def test_a_loader_with_an_end_starts_anew_and_an_endless_one_goes_on():
    finite = make_loader(Rows(6), 2, epochs=1, workers=1)
    endless = make_loader(Rows(6), 2, workers=1)
    assert take(finite, 9) == take(finite, 9) == take(endless, 3)
    assert (finite.samples, endless.samples) == (6, 6)
    endless.close()
    assert take(endless, 4) == take(make_loader(Rows(6), 2, start=6), 4)
    assert endless.samples == 14
    endless.close()
    late = make_loader(Rows(11), 2, rank=1, world=2, start=3, epochs=1)
    assert (late.samples, len(late), [late.samples for _ in late]) == (3, 2, [7, 11])
    assert list(make_loader(Rows(11), 2, start=11, epochs=1)) == []
    first = iter(finite)
    next(first)
    next(iter(finite))
    with pytest.raises(RuntimeError, match=r"another loop restarted this loader"):
        next(first)
    finite.close()


def test_a_loop_goes_on_from_where_the_loader_was_sent():
    loader, seen = make_loader(Rows(24), 2, shuffle=False, workers=1), []
    for batch in loader:
        seen += rows_of(batch)
        if len(seen) == 6:
            loader.seek(2, skip=[(4, 4)])
        if len(seen) == 14:
            break
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3, 8, 9, 10, 11, 12, 13]
    assert loader.samples == 10
    assert loader.locate(2, 6) == [(None, 2), (None, 3), (None, 8), (None, 9)]
    loader.close()


def test_threads_end_with_the_loop_with_close_and_with_the_loader():
    before = set(threading.enumerate())
    list(make_loader(Rows(6), 2, epochs=1, workers=3))
    assert set(threading.enumerate()) <= before  # those of before may be ending
    with make_loader(Rows(6), 2, workers=3) as loader:
        next(iter(loader))
        assert len(set(threading.enumerate()) - before) >= 3
    assert set(threading.enumerate()) <= before
    next(iter(loader))
    del loader
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"device": "meta"}], ids=str)
def test_an_exception_reaches_the_consumer_in_its_turn_and_can_be_retried(options):
    before = set(threading.enumerate())
    dataset = Rows(8, broken=5)
    loader = make_loader(dataset, 2, shuffle=False, **options)
    with pytest.raises(KeyError, match=r"\('row is bad', 5\)"):
        list(itertools.islice(loader, 3))
    assert loader.samples == 4
    assert set(threading.enumerate()) <= before
    dataset.broken = None
    next(iter(loader))
    assert loader.samples == 6
    loader.close()


SCRIPT = """
import os, signal, threading, time, warnings
import torch
from tensordict import TensorDict
from forgekit.data.loader import make_loader

class Slow(list):
    def __getitem__(self, row):
        time.sleep(0.5)
        return list.__getitem__(self, row)

def read():
    next(stream)
    print(torch.get_num_threads(), "threads", flush=True)

warnings.simplefilter("error")
torch.set_num_threads(2)
rows = Slow(TensorDict({"input_ids": torch.tensor([i])}) for i in range(8))
stream = iter(make_loader(rows, 1, workers=2))
reader = threading.Thread(target=read)  # which has not read its number of threads before
reader.start()
reader.join()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
for batch in stream:
    pass
"""


def test_open_loaders_leave_the_threads_of_torch_and_an_interrupt_ends_them_quietly(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with launch(tmp_path / "script.py", [], log=tmp_path / "log") as job:
        assert job.process.wait() == -signal.SIGINT, job.output
    assert job.output.splitlines()[-1] == "KeyboardInterrupt"
    assert "2 threads" in job.output
    assert job.output.count("Traceback") == 1


def test_transforms_make_micro_batches_in_their_order_and_padding_stays_masked():
    def add_ten(batch):
        return batch.set("input_ids", batch["input_ids"] + 10)

    def label(batch):
        return batch.set("labels", batch["input_ids"] + 1)

    options = {"transforms": (add_ten, label), "shuffle": False, "epochs": 1, "workers": 2}
    batches = list(make_loader(Rows(3), 2, **options))
    assert [rows_of(batch) for batch in batches] == [[10, 11], [12, 12]]
    assert batches[1]["labels"].tolist() == [[13] * 3, [-100] * 3]


@pytest.mark.parametrize("ahead", [0, 3])
def test_micro_batches_come_on_the_device_and_no_more_are_ahead_than_asked_for(ahead):
    """On "meta", the one device besides the CPU that every machine has."""
    dataset = Rows(100)
    with make_loader(dataset, 2, device="meta", ahead=ahead) as loader:
        batch = next(iter(loader))
        assert batch["input_ids"].is_meta
        assert (batch.batch_size, loader.samples) == ((2,), 2)
        time.sleep(0.1)
        assert len(dataset.read) == 2 * (1 + ahead)


# A replica group's part of a step: each row once, whoever takes part, and nothing read twice.


def share_of(loader, *where, **options):
    """The rows of a share that count, and its micro-batches by number."""
    share = loader.share(*where, **options)
    batches = [rows_of(batch) for batch in share]
    assert len(batches) == len(share)
    numbered = dict(enumerate(batches, start=share.first_number))
    return (sorted(itertools.chain(*batches)) if share.samples else []), numbered, share.samples


def test_parts_are_all_of_a_step_whoever_takes_part():
    """Groups come and go, a step is done again, and one is behind. 5 micro-batches of 2 x 3."""
    options = {"dataset": Rows(1000), "batch_size": 3, "shuffle": False, "world": 2}
    loaders = [make_loader(**options, rank=n % 2, workers=n // 2 % 2) for n in range(14)]
    for step, participants in [(0, 3), (0, 3), (1, 3), (1, 1), (2, 7), (3, 2), (4, 4), (5, 4)]:
        rows, samples = [], 0
        for n, loader in enumerate(loaders[: 2 * participants]):
            mine, numbered, counted = share_of(loader, step * 30, 5, n // 2, participants)
            rows += mine
            samples += counted
            for number, batch in numbered.items():
                first = step * 30 + (number * 2 + n % 2) * 3
                assert batch == [*range(first, first + 3)]
        assert (sorted(rows), samples) == ([*range(step * 30, (step + 1) * 30)], 60)
    for loader in loaders:
        loader.close()


def test_parts_differ_by_one_multiple_at_most():
    loader = make_loader(Rows(1000), 1, shuffle=False)
    assert [len(loader.share(0, 12, index, 5)) for index in range(5)] == [2, 2, 3, 2, 3]
    shares = [loader.share(0, 12, index, 5, multiple=4) for index in range(5)]
    assert [len(share) for share in shares] == [4] * 5
    assert [share.samples for share in shares] == [0, 4, 0, 4, 4]
    assert make_loader(Rows(8), 2, world=3).share(0, 4).whole == (4, 6)


def test_what_was_read_ahead_is_used_where_nothing_changes_and_a_broken_share_is_taken_again():
    dataset = Rows(1000)
    loader = make_loader(dataset, 1, shuffle=False, workers=2)
    for step in range(5):
        list(loader.share(4 * step, 4, 1, 2))
    loader.close()
    read = sorted(dataset.read)
    assert read[:10] == [row for row in range(20) if row % 4 >= 2]  # each once, none of the other
    assert len(set(read)) == len(read)
    next(iter(loader.share(0, 4)))
    assert share_of(loader, 0, 4)[0] == [0, 1, 2, 3]
    assert share_of(loader, 0, 4, 1, 2, skip=((2, 3),))[0] == [5, 6]
    loader.close()


def made(**options):
    return make_loader(**{"dataset": Rows(3), "batch_size": 2, **options})


BAD = {
    r"len\(dataset\) 0 must be at least 1": lambda: made(dataset=[]),
    "9 must be .* ranks = 6; the nearest are 6 and 12": lambda: made(world=3).micro_batches(9),
    "need an endless loader, epochs=None": lambda: made(epochs=1).share(0, 4),
    "micro_batches 6 must be a multiple of 4": lambda: made().share(0, 6, multiple=4),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()
