import contextlib
import math
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from lab import file_size_limit
from pool import run_ranks
from runs import saved_step
from tensordict import TensorDict
from torch.distributed.tensor.debug import CommDebugMode

import forgekit as fk
from forgekit.files import append_lines
from forgekit.metrics.flops import Flops, Utilization
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.records import RowFile, read_bad_steps, read_metrics
from forgekit.state import TrainState, donate


def create():
    model = torch.nn.Linear(2, 2)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def state():
    return create()


def metrics_of(step, *, device="cpu", **changes):
    values = {"loss": 10.0 - step, "grad_norm": 0.5, "lr": 1e-3 * step, "skipped": 0.0}
    values |= {"targets": 100.0 + step, **changes}
    wide = {"dtype": torch.float64, "device": device}
    return TensorDict({name: torch.tensor(value, **wide) for name, value in values.items()}, [])


def train(log, state, steps, **changes):
    rows = []
    for step in steps:
        state = donate(state, step=step, samples=8 * step)
        rows.append(log(state, metrics_of(step, **changes)))
    return state, rows


def test_a_row_is_due_every_so_many_steps_and_at_the_last_and_is_written_by_one_rank(
    tmp_path, state, capfd
):
    named = {"source/a/targets": 7.0, "source/b/targets": 2.5, "source/c/targets": math.nan}
    with MetricsLog(tmp_path, every=3, total=4) as log:
        after, rows = train(log, state, [1, 2, 3], accuracy=0.25, **named)
        (written,) = read_metrics(tmp_path / "metrics.jsonl")  # before it is closed
        _, more = train(log, after, [4])
    assert [row and row["step"] for row in [*rows, *more]] == [None, None, 3, 4]
    # NaN stays NaN in the row that a program gets, and is null in the file, which is strict JSON.
    assert math.isnan(rows[-1].pop("source/c/targets"))
    assert written.pop("source/c/targets") is None
    assert written == rows[-1]
    assert repr(rows[-1]["source/a/targets"]) == "7", "a count, where it is whole"
    expected = {"step": 3, "samples": 24, "train/loss": 7.0, "train/grad_norm": 0.5}
    expected |= {"train/lr": 3e-3, "train/targets": 103, "train/skipped": 0}
    assert (expected | {"train/accuracy": 0.25, "source/b/targets": 2.5}).items() <= written.items()
    capfd.readouterr()
    with MetricsLog(tmp_path / "other", every=3, is_writer=False) as log:
        after, (*_, row) = train(log, create(), [1, 2, 3])
        log.event(after, {"eval/held_out/loss": 1.0})
        log.message("hello")
    assert expected.items() <= row.items()
    assert not (tmp_path / "other").exists()
    assert capfd.readouterr() == ("", "")


def test_an_evaluation_joins_the_row_of_its_step(tmp_path, state):
    with MetricsLog(tmp_path, every=2) as log:
        log.event(state, {"eval/held_out/loss": torch.tensor(9.0)})
        state, _ = train(log, state, [1, 2])
        log.event(state, {"eval/held_out/loss": torch.tensor(2.5), "eval/held_out/rows": 7})
        log.event(state, {"eval/code/loss": 1.5})
        state, _ = train(log, state, [3])
        log.event(state, {"eval/code/loss": 1.25})
        train(log, state, [4])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 3, 4]
    joined = {"train/loss": 8.0, "eval/held_out/loss": 2.5, "eval/held_out/rows": 7}
    assert (joined | {"eval/code/loss": 1.5}).items() <= rows[1].items()
    assert rows[2] == {"step": 3, "samples": 24, "eval/code/loss": 1.25}


def test_what_is_no_training_is_outside_the_window(tmp_path, state, monkeypatch):
    """A save and two evaluations, one after the other, and a save alone."""

    def slowly(*args, **options):
        time.sleep(0.2)
        return fk.checkpoint_save(*args, **options)

    monkeypatch.setattr("forgekit.run.run_directory.checkpoint_save", slowly)
    found, started = [], time.perf_counter()
    with fk.open_run(tmp_path, {}) as run, run.start(state, every=3) as log:
        for step in range(1, 7):
            time.sleep(0.03)
            state, rows = train(log, state, [step])
            found += rows
            if step in (3, 5):  # 3 is the step of a row
                run.save(state)
                for name in ("code", "prose") if step == 3 else ():
                    time.sleep(0.1)
                    log.event(state, {f"eval/{name}/loss": 1.0})
        took = time.perf_counter() - started
    assert saved_step(tmp_path) == 5
    seconds = [3 * row["perf/step_seconds"] for row in found if row is not None]
    assert min(seconds) >= 0.09
    assert sum(seconds) <= took - 0.6


LEFT = [
    ('{"step": 1}\n{"step": 2}', 2, [1, 2]),
    ('{"step": 1}\n{"step": 2}\n{"ste', 1, [1]),
    ('{"step": 3}\n', 2, []),
]


@pytest.mark.parametrize(("content", "step", "left"), LEFT)
def test_rows_up_to_the_step_stay_and_the_next_one_begins_a_line(tmp_path, content, step, left):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    file = RowFile(tmp_path, step)
    file.write({"step": 9})
    file.close()
    assert path.read_text() == "".join(f'{{"step": {n}}}\n' for n in [*left, 9])


def test_a_row_that_does_not_fit_leaves_the_rows_before_it_whole(tmp_path, state):
    """And where there is room again, the next one is a line of its own."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(tmp_path, every=1) as log:
        state, _ = train(log, state, [1, 2])
        before = path.read_bytes()
        with file_size_limit(len(before) + 100), pytest.raises(OSError, match="File too large"):
            log.event(state, {f"eval/{'x' * 200}/loss": 1.0})
        assert path.read_bytes() == before
        state = donate(state, step=3)
        with file_size_limit(len(before) + 100), pytest.raises(OSError, match="File too large"):
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
        where = {"start_step": start, "start_samples": 8 * start}
        with MetricsLog(tmp_path, every=3, loader=Locates(), **where) as log:
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


@pytest.mark.parametrize("before", ["", "x\n", '{"torn'])
def test_lines_begin_after_a_whole_line_and_are_all_there_or_none(tmp_path, before):
    path, after = tmp_path / "lines", f"{before}\na\nb\n".replace("\n\n", "\n").lstrip("\n")
    path.write_text(before)
    with file_size_limit(len(after) - 1), pytest.raises(OSError, match="File too large"):
        append_lines(path, ["a", "b"])
    assert path.read_text() == before
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
    watched = {"moe/load_max": 1.456, "rollout/reward": 0.5, "dpo/margin": 0.25}
    with MetricsLog(tmp_path, every=2, total=4) as log:
        state, _ = train(log, state, [1], lr=2.9e-3)
        state, _ = train(log, state, [2], lr=2.9e-3, skipped=1.0, **watched)
        log.event(state, {"eval/held_out/loss": 2.5})
        log.message("saved")
    out, err = capfd.readouterr()
    (row, *lines), shown = err.splitlines(), "load 1.46x  reward 0.500  margin 0.250  1 bad step"
    assert re.fullmatch(rf"step 2/4  loss 9\.0000  lr 2\.9e-03  .* tokens/s  {shown}", row)
    assert (lines, out) == (["step 2  eval/held_out/loss 2.5000", "saved"], "")


@contextlib.contextmanager
def terminal(monkeypatch):
    """Put stderr on a real terminal; the list that it gives holds, afterwards, what was written."""
    master, slave = pty.openpty()
    chunks = []
    with monkeypatch.context() as patch, open(slave, "w") as stream:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "120")
        patch.setattr(sys, "stderr", stream)
        yield chunks
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while chunk := os.read(master, 4096):
            chunks.append(chunk)
    os.close(master)


def test_a_bar_on_a_terminal_gives_the_terminal_back(tmp_path, state, monkeypatch, capsys):
    with (  # noqa: PT012
        terminal(monkeypatch) as chunks,
        pytest.raises(KeyboardInterrupt),
        MetricsLog(tmp_path, every=2, total=10) as log,
    ):
        train(log, state, range(1, 5))
        log.message("a line [in] brackets")
        print("for the pipe")  # noqa: T201
        os.kill(os.getpid(), signal.SIGINT)
    screen = b"".join(chunks).decode()
    assert 0 <= screen.rindex("\x1b[?25l") < screen.rindex("\x1b[?25h"), "the cursor is shown again"
    for text in ("step 4/10", f"loss {(7 * 103 + 6 * 104) / 207:.4f}", "a line [in] brackets"):
        assert text in screen
    assert capsys.readouterr().out == "for the pipe\n"
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4]


def test_a_row_has_the_share_of_the_peak_since_the_last_row(tmp_path, state, capsys):
    flops = Flops(per_token=2e6, per_pair=5e5, parameters=1, active_parameters=1)
    documents = [range(1, 3 + index) for index in range(32)]
    loader = fk.make_loader(fk.packed_dataset(documents, fk.pack([*range(2, 34)], 64)), 1)
    use = Utilization.of(flops, state, loader, peak=1e12)
    assert use is not None
    with MetricsLog(tmp_path, every=2, start_samples=0, utilization=use) as log:
        _, (_, first, _, second) = train(log, state, range(1, 5))
    assert f" tokens/s  mfu {first['perf/mfu']:.1%}\n" in capsys.readouterr().err
    for row, samples in ((first, (0, 16)), (second, (16, 32))):
        for name, best in use.ideal(*samples).items():
            assert row[name] == pytest.approx(best / row["perf/step_seconds"] / 2)
    assert use.ideal(0, 16) != use.ideal(16, 32)


def test_the_mean_loss_of_a_row_is_over_the_targets_of_its_good_steps(tmp_path, state, capsys):
    """Steps whose loss is not finite are bad."""
    steps = [(2.0, 3.0), (5.0, 1.0), (math.nan, 7.0), (1.0, 4.0), (math.inf, 2.0)]
    with MetricsLog(tmp_path, every=5) as log:
        for step, (loss, targets) in enumerate([*steps, *steps[2:3] * 5], start=1):
            bad = float(not math.isfinite(loss))
            state, [row] = train(log, state, [step], loss=loss, targets=targets, skipped=bad)
            if step == 5:
                assert row["train/loss_mean"] == pytest.approx((2 * 3 + 5 * 1 + 1 * 4) / 8)
                assert row["train/skipped"] == 2
        assert math.isnan(row["train/loss_mean"]), "no step was good"
        with pytest.raises(ValueError, match=r"'eval/x' has shape \(3,\); a metric must be one"):
            log.event(state, {"eval/x": torch.zeros(3)})
    assert capsys.readouterr().err.startswith("step 5  loss 1.8750  ")


def square_loss(model, batch):
    return fk.Loss(model(batch["x"]).square().sum(), 2)


def _on_ranks(rank, world, out):
    """Memory of a step on a row of each rank, and rows of steps that took other times."""
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(torch.nn.Linear(6, 5), mesh)
    model.bias.requires_grad_(False)
    state = TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(square_loss, schedule=fk.constant(0.1))
    with MetricsLog(out / str(rank), every=1) as log:
        state, metrics = step(state, [TensorDict({"x": torch.ones(2, 6)}, [2])])
        row = log(state, metrics)
    peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert row["memory/peak_gib"] == pytest.approx(peak_kib / 2**20, rel=0.05)
    loader, rows = Locates(), []
    with MetricsLog(out, every=2, is_writer=rank == 0, loader=loader) as log:
        for number in range(1, 5):
            time.sleep(0.05 * (rank + 1))
            loader.wait_seconds = number * (0.25 + 0.5 * rank)
            with CommDebugMode() as collectives:
                state, found = train(log, state, [number])
            assert collectives.get_total_counts() == (number % 2 == 0)
            rows += found
    assert rows[1]["perf/step_seconds"] >= 0.05 * (rank + 1)
    return rows[1::2]


def test_memory_is_that_of_a_rank_and_times_have_least_mean_and_most_over_the_ranks(tmp_path):
    here, there = run_ranks(_on_ranks, 2, tmp_path)
    for rows, targets in zip(zip(here, there, strict=True), (203, 207), strict=True):
        for name in ("step_seconds", "data_wait_seconds"):
            times = [row[f"perf/{name}"] for row in rows]
            expected = min(times), sum(times) / 2, max(times)
            for row in rows:
                found = [row[f"perf/{name}_{kind}"] for kind in ("min", "mean", "max")]
                assert found == pytest.approx(expected)
        for row in rows:  # targets count once, not once per rank
            steps_s = 2 * row["perf/step_seconds"]
            assert row["perf/tokens_per_second"] * steps_s == pytest.approx(targets)
    assert here[1]["perf/data_wait_seconds_max"] == 0.75
    assert here[1]["perf/step_seconds_max"] > here[1]["perf/step_seconds_min"] + 0.02
