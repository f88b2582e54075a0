import contextlib
import math
import os
import pty
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import run_ranks
from runs import saved_step
from tensordict import TensorDict
from torch.distributed.tensor.debug import CommDebugMode

import forgekit as fk
from forgekit.files import append_lines, lines_backwards
from forgekit.metrics.flops import Flops, Utilization
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.records import RowFile, read_bad_steps, read_metrics
from forgekit.state import TrainState, donate


class Loader:
    wait_seconds = 0.0


@pytest.fixture
def state():
    model = torch.nn.Linear(2, 2)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def at(state, step):
    return donate(state, step=step, samples=8 * step)


def metrics_of(step, *, device="cpu", **changes):
    values = {
        "loss": 10.0 - step,
        "grad_norm": 0.5,
        "lr": 1e-3 * step,
        "targets": 100.0 + step,
        "skipped": 0.0,
    }
    tensors = {
        name: torch.tensor(value, dtype=torch.float64, device=device)
        for name, value in (values | changes).items()
    }
    return TensorDict(tensors, batch_size=[])


def train(log, state, steps, **changes):
    rows = []
    for step in steps:
        state = at(state, step)
        rows.append(log(state, metrics_of(step, **changes)))
    return state, rows


def test_a_row_is_due_every_so_many_steps_and_at_the_last_and_has_the_numbers_of_its_step(
    tmp_path, state
):
    named = {f"source/{name}/targets": count for name, count in (("a", 7.0), ("b", 2.5))}
    named |= {"source/code/loss": 2.5, "source/c/targets": math.nan}
    with MetricsLog(tmp_path, every=3, total=4) as log:
        state, rows = train(log, state, [1, 2, 3], accuracy=0.25, **named)
        (written,) = read_metrics(tmp_path / "metrics.jsonl")  # before it is closed
        _, more = train(log, state, [4])
    assert [row and row["step"] for row in [*rows, *more]] == [None, None, 3, 4]
    # NaN stays NaN in the row that a program gets, and is null in the file, which is strict JSON.
    assert math.isnan(rows[-1].pop("source/c/targets"))
    assert written.pop("source/c/targets") is None
    assert written == rows[-1]
    assert repr(rows[-1]["source/a/targets"]) == "7", "a count, where it is whole"
    expected = {
        "step": 3,
        "samples": 24,
        "train/loss": 7.0,
        "train/grad_norm": 0.5,
        "train/lr": 3e-3,
        "train/targets": 103,
        "train/skipped": 0,
        "train/accuracy": 0.25,
        "source/code/loss": 2.5,
        "source/b/targets": 2.5,
    }
    assert expected.items() <= rows[-1].items()


def test_other_ranks_get_the_same_rows_and_write_nothing(tmp_path, state, capfd):
    with MetricsLog(tmp_path / "a", every=2, is_writer=False) as log:
        state, rows = train(log, state, [1, 2])
        log.event(state, {"eval/held_out/loss": 1.0})
        log.message("hello")
    assert rows[-1]["train/targets"] == 102
    assert not (tmp_path / "a").exists()
    assert capfd.readouterr() == ("", "")


def test_an_evaluation_joins_the_row_of_its_step(tmp_path, state):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, every=2) as log:
        log.event(state, {"eval/held_out/loss": torch.tensor(9.0)})
        state, _ = train(log, state, [1, 2])
        log.event(state, {"eval/held_out/loss": torch.tensor(2.5), "eval/held_out/rows": 7})
        log.event(state, {"eval/code/loss": 1.5})
        state, _ = train(log, state, [3])
        log.event(state, {"eval/code/loss": 1.25})
        train(log, state, [4])
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 2, 3, 4]
    joined = {"train/loss": 8.0, "eval/held_out/loss": 2.5, "eval/held_out/rows": 7}
    assert (joined | {"eval/code/loss": 1.5}).items() <= rows[1].items()
    assert rows[2] == {"step": 3, "samples": 24, "eval/code/loss": 1.25}


def test_what_is_no_training_is_outside_the_window(tmp_path, state, monkeypatch):
    """A save and two evaluations, one after the other, and a save alone."""

    def slowly(*args, **options):
        time.sleep(0.3)
        return fk.checkpoint_save(*args, **options)

    monkeypatch.setattr("forgekit.run.run_directory.checkpoint_save", slowly)
    found, started = [], time.perf_counter()
    with fk.open_run(tmp_path, {}) as run, run.start(state, every=3) as log:
        for step in range(1, 7):
            time.sleep(0.05)
            state, rows = train(log, state, [step])
            found += rows
            if step in (3, 5):  # 3 is the step of a row
                run.save(state)
                for name in ("code", "prose") if step == 3 else ():
                    time.sleep(0.15)
                    log.event(state, {f"eval/{name}/loss": 1.0})
        took = time.perf_counter() - started
    assert saved_step(tmp_path) == 5
    seconds = [3 * row["perf/step_seconds"] for row in found if row is not None]
    assert min(seconds) >= 0.15
    assert sum(seconds) <= took - 0.9


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3", b"{}"])), st.integers(1, 5))
def test_lines_from_the_end_are_those_from_the_start(pieces, block):
    content, end = b"".join(pieces), 0
    lines = [(end := end + len(line), line) for line in content.splitlines(keepends=True)]
    expected = [(end - len(line), line) for end, line in reversed(lines)]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content)
        assert list(lines_backwards(Path(file.name), block)) == expected


def test_resuming_reads_the_end_of_the_metrics_alone(tmp_path):
    def has_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    path, rows = tmp_path / "metrics.jsonl", 50_000
    path.write_text("".join(f'{{"step": {step}, "train/loss": 1.0}}\n' for step in range(rows)))
    size = path.stat().st_size
    before = has_read()
    tracemalloc.start()
    RowFile(tmp_path, rows - 101).close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert has_read() - before < min(size, 2**16) + 2**13
    assert peak < 2**20
    assert path.read_text().count("\n") == read_metrics(path)[-1]["step"] + 1 == rows - 100


@pytest.mark.parametrize(
    ("content", "step", "left"),
    [
        ('{"step": 1}\n{"step": 2}\n', 2, [1, 2]),
        ('{"step": 1}\n{"step": 2}', 2, [1, 2]),
        ('{"step": 1}\n{"step": 2}\n{"ste', 1, [1]),
        ('{"step": 3}\n', 2, []),
        ("", 0, []),
    ],
)
def test_rows_up_to_the_step_stay_and_the_next_one_begins_a_line(tmp_path, content, step, left):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    file = RowFile(tmp_path, step)
    file.write({"step": 9})
    file.close()
    assert path.read_text() == "".join(f'{{"step": {n}}}\n' for n in [*left, 9])


@contextlib.contextmanager
def room(size):
    """A disk on which a file may have so many bytes: it takes the first part of what is longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_row_that_does_not_fit_leaves_the_rows_before_it_whole(tmp_path, state):
    """And where there is room again, the next one is a line of its own."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, every=1) as log:
        state, _ = train(log, state, [1, 2])
        before = path.read_bytes()
        full = "no room for the row of step 2; the rows before it are whole"
        with room(len(before) + 100), pytest.raises(OSError, match=full):
            log.event(state, {f"eval/{'x' * 200}/loss": 1.0})
        assert path.read_bytes() == before
        state, full = at(state, 3), full.replace("2", "3")
        with room(len(before) + 100), pytest.raises(OSError, match=full):
            log(state, metrics_of(3))
        assert path.read_bytes() == before
        train(log, state, [4])
    assert path.read_bytes().startswith(before)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 4]


class Locates:
    """A loader that knows where samples are."""

    wait_seconds = 0.0

    def locate(self, first, stop):
        return [(None, 100 + sample) for sample in range(first, stop)]


def test_bad_steps_after_the_last_row_are_written_down_when_a_run_stops(tmp_path, state, capsys):
    for start in (0, 4):  # a run, and the one that goes on from where it stopped
        with MetricsLog(
            tmp_path, start_step=start, every=3, loader=Locates(), start_samples=8 * start
        ) as log:
            state, _ = train(log, state, [start + 1])
            state, _ = train(log, state, [start + 2], skipped=1.0, loss=math.nan)
            state, _ = train(log, state, [start + 3, start + 4], skipped=float(start == 0))
    found = read_bad_steps(tmp_path)
    assert [record["step"] for record in found] == [2, 3, 4, 6]
    assert [record["samples"] for record in found] == [[8, 16], [16, 24], [24, 32], [40, 48]]
    assert found[2]["rows"] == list(range(124, 132))
    assert "1 bad step since the last row, in " in capsys.readouterr().err
    assert [row["train/skipped"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 1]


def test_a_run_that_fails_reads_nothing_more_from_its_device(tmp_path, state):
    """It may be the device that failed; the steps are done again from the checkpoint."""
    with pytest.raises(KeyError, match="mine"), MetricsLog(tmp_path, every=3) as log:  # noqa: PT012
        train(log, state, [1], skipped=1.0, device="meta")
        raise KeyError("mine")
    assert not (tmp_path / "bad_steps.jsonl").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "a\nb\n"),
        ("x\n", "x\na\nb\n"),
        ('{"torn', '{"torn\na\nb\n'),
    ],
)
def test_lines_begin_after_a_whole_line_and_are_all_there_or_none(tmp_path, before, after):
    path = tmp_path / "lines"
    if before is not None:
        path.write_text(before)
    with room(len(after) - 1), pytest.raises(OSError, match="File too large"):
        append_lines(path, ["a", "b"])
    assert path.read_text() == (before or "")
    append_lines(path, ["a", "b"])
    assert path.read_text() == after


@pytest.mark.parametrize("torn", [b'{"step": 3, "a": "\xc3', b"{}", b"\x00\n"])
def test_only_a_torn_last_line_is_left_out(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes(b'{"step": 1}\n' + torn.rstrip() + b'\n{"step": 2}\n')
    for read in (lambda: read_metrics(path), lambda: RowFile(tmp_path, 0)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .* is not a JSON object"):
            read()


def test_without_a_terminal_there_is_a_plain_line_per_row(tmp_path, state, capfd):
    with MetricsLog(tmp_path, every=2, total=4) as log:
        watched = {
            "moe/load_max": 1.456,
            "rollout/reward": 0.5,
            "dpo/margin": 0.25,
            "dpo/accuracy": 0.75,
        }
        state, _ = train(log, state, [1], lr=2.9e-3)
        state, _ = train(log, state, [2], lr=2.9e-3, skipped=1.0, **watched)
        log.event(state, {"eval/held_out/loss": 2.5})
        log.message("saved")
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 3
    assert lines[0].startswith("step 2/4  loss 9.0000  lr 2.9e-03  ")
    shown = " tokens/s  load 1.46x  reward 0.500  margin 0.250  accuracy 0.750  1 bad step"
    assert lines[0].endswith(shown)
    assert lines[1:] == ["step 2  eval/held_out/loss 2.5000", "saved"]
    assert "\x1b" not in err


@contextlib.contextmanager
def terminal(monkeypatch):
    """Put stderr on a real terminal; the list that it gives holds, afterwards, what was written."""
    master, slave = pty.openpty()
    chunks = []

    def read():
        with contextlib.suppress(OSError):  # how Linux says that the other side is closed
            while chunk := os.read(master, 4096):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, open(slave, "w") as stream:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", stream)
        yield chunks
    reader.join()
    os.close(master)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("inside", "error"),
    [(lambda: None, None), (interrupt, KeyboardInterrupt)],
)
def test_a_bar_on_a_terminal_gives_the_terminal_back(
    tmp_path, state, monkeypatch, capsys, inside, error
):
    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with terminal(monkeypatch) as chunks, expected, MetricsLog(tmp_path, every=2, total=10) as log:
        train(log, state, range(1, 5))
        log.message("a line [in] brackets")
        print("for the pipe")  # noqa: T201
        inside()
    screen = b"".join(chunks).decode()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert hide in screen
    assert screen.rindex(show) > screen.rindex(hide)
    assert "step 4/10" in screen
    assert f"loss {(7 * 103 + 6 * 104) / 207:.4f}  lr 4.0e-03" in screen
    assert "a line [in] brackets" in screen
    assert capsys.readouterr().out == "for the pipe\n"
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4]


def test_a_row_has_the_share_of_the_peak_since_the_last_row(tmp_path, state, capsys):
    flops = Flops(per_token=2e6, per_pair=5e5, parameters=1, active_parameters=1)
    documents = [range(1, 3 + index) for index in range(32)]
    rows = fk.packed_dataset(documents, fk.pack([len(one) for one in documents], 64))
    loader = fk.make_loader(rows, 1)
    use = Utilization.of(flops, state, loader, peak=1e12)
    assert use is not None
    with MetricsLog(tmp_path, every=2, start_samples=0, utilization=use) as log:
        state, first = train(log, state, [1, 2])
        time.sleep(0.1)
        log.event(state, {"eval/held_out/loss": 1.0})  # an evaluation is outside of the window
        _, second = train(log, state, [3, 4])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(f" tokens/s  mfu {first[-1]['perf/mfu']:.1%}")
    for row, samples in ((first[-1], (0, 16)), (second[-1], (16, 32))):
        for name, best in use.ideal(*samples).items():
            assert row[name] == pytest.approx(best / row["perf/step_seconds"] / 2)
    assert use.ideal(0, 16) != use.ideal(16, 32)


"""Loss and targets of each step; those that are not finite are bad."""


def test_the_mean_loss_of_a_row_is_over_the_targets_of_its_good_steps(tmp_path, state, capsys):
    steps = [(2.0, 3.0), (5.0, 1.0), (math.nan, 7.0), (1.0, 4.0), (math.inf, 2.0)]
    with MetricsLog(tmp_path, every=5) as log:
        for step, (loss, targets) in enumerate([*steps, *steps[2:3] * 5], start=1):
            bad = float(not math.isfinite(loss))
            state, [row] = train(log, state, [step], loss=loss, targets=targets, skipped=bad)
            if step == 5:
                assert row["train/loss_mean"] == pytest.approx((2 * 3 + 5 * 1 + 1 * 4) / 8)
                assert row["train/skipped"] == 2
        assert math.isnan(row["train/loss_mean"]), "no step was good"
        with pytest.raises(ValueError, match=r"'eval/x' has shape \(3,\); a metric is one number"):
            log.event(state, {"eval/x": torch.zeros(3)})
    assert capsys.readouterr().err.startswith("step 5  loss 1.8750  ")


def _memory(rank, world, out):
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(torch.nn.Linear(6, 5), mesh)
    model.bias.requires_grad_(False)
    state = TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(
        lambda model, batch: fk.Loss(model(batch["x"]).square().sum(), 2), schedule=fk.constant(0.1)
    )
    with MetricsLog(out / str(rank), every=1) as log:
        row = log(*step(state, [TensorDict({"x": torch.ones(2, 6)}, [2])]))
    found = {name: size * 2**30 for name, size in row.items() if name.startswith("memory/")}
    peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert found.pop("memory/peak_gib") == pytest.approx(peak_kib * 2**10, rel=0.05)
    return {name: size / 4 for name, size in found.items()}


def test_memory_is_that_of_a_rank_s_shards(tmp_path):
    """Of five rows the first rank has three; the bias is frozen, and each moment has a count."""
    names = [f"memory/{kind}_gib" for kind in ("parameters", "gradients", "optimizer")]
    expected = [[21, 18, 2 * 18 + 1], [14, 12, 2 * 12 + 1]]  # and nobody knows the rest
    found = run_ranks(_memory, 2, tmp_path)
    assert found == [dict(zip(names, sizes, strict=True)) for sizes in expected]


def _times(rank, world, out):
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(torch.nn.Linear(4, 4), mesh)
    state = TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    loader = Loader()
    rows = []
    with MetricsLog(out, every=2, is_writer=rank == 0, loader=loader) as log:
        for step in range(1, 5):
            time.sleep(0.05 * (rank + 1))
            loader.wait_seconds = step * (0.25 + 0.5 * rank)
            state = at(state, step)
            with CommDebugMode() as collectives:
                rows.append(log(state, metrics_of(step)))
            assert collectives.get_total_counts() == (step % 2 == 0)
    assert rows[1]["perf/step_seconds"] >= 0.05 * (rank + 1)
    return rows[1::2]


def test_a_row_has_the_least_the_mean_and_the_most_of_the_ranks_times(tmp_path):
    here, there = run_ranks(_times, 2, tmp_path)
    for name in ("step_seconds", "data_wait_seconds"):
        for rows in zip(here, there, strict=True):
            times = [row[f"perf/{name}"] for row in rows]
            expected = min(times), sum(times) / 2, max(times)
            for row in rows:
                found = [row[f"perf/{name}_{kind}"] for kind in ("min", "mean", "max")]
                assert found == pytest.approx(expected)
    for row, targets in zip((*here, *there), (203, 207) * 2, strict=True):  # not once per rank
        found = row["perf/tokens_per_second"] * 2 * row["perf/step_seconds"]
        assert found == pytest.approx(targets)
    assert here[1]["perf/data_wait_seconds_max"] == 0.75
    assert here[1]["perf/step_seconds_max"] > here[1]["perf/step_seconds_min"] + 0.02
