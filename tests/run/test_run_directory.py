"""However a run ends, its directory says so and nothing is left open."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lab import alone, lay_out
from pool import run_ranks
from runs import status_of as status
from torch import nn

import forgekit as fk
from forgekit.run import run_directory


def create(step=0):
    return fk.donate(alone(nn.Linear(2, 2)), step=step, samples=8 * step)


@contextmanager
def started(out, state=None, config=(), **options):
    """A run whose set-up is over."""
    with fk.open_run(out, dict(config)) as run:
        run.start(create() if state is None else state, every=1, **options).close()
        yield run


class Unexpected(Exception):
    pass


@pytest.mark.parametrize("error", [ValueError("oh"), KeyboardInterrupt("oh")])
@pytest.mark.parametrize("starts", [True, False], ids=["in the loop", "in a recipe's set-up"])
def test_what_goes_wrong_goes_on_as_it_is(tmp_path, error, starts):
    """A ValueError too: only what the library refuses in set-up is the user's mistake."""
    with pytest.raises(type(error)) as raised, fk.open_run(tmp_path, {}) as run:  # noqa: PT012
        fk.build_mesh(device="cpu")
        if starts:
            run.start(create(step=3), every=1).close()
        fk.checkpoint_save(create(step=4), run.checkpoints)
        raise error
    assert raised.value is error
    assert not dist.is_initialized()
    assert saved(tmp_path) == ["step_00000004"], "what is under way is waited for"
    at = {"step": 3, "samples": 24} if starts else {}
    found = {"status": "failed", "reason": f"{type(error).__name__}: oh", **at}
    assert status(tmp_path) == found | {"time": status(tmp_path)["time"]}


def test_a_last_save_that_fails_is_the_failure_of_the_run(tmp_path):
    (tmp_path / "file").touch()
    state = create(step=4)
    out, failure = tmp_path / "run", pytest.raises(fk.CheckpointError, match="could not be saved")
    with failure, fk.open_run(out, {}) as run:
        run.start(state, every=1).close()
        fk.checkpoint_save(state, tmp_path / "file" / "checkpoints")
    assert status(out)["status"] == "failed"


USAGE = [
    (lambda: fk.MeshSpec(tp=0), "ValueError: tp is 0; a mesh dimension must be at least 1"),
    (lambda: fk.token_dataset("nowhere"), "FileNotFoundError: "),
]


@pytest.mark.parametrize("case", USAGE)
def test_what_the_library_refuses_in_set_up_exits_2_with_its_message_alone(tmp_path, capsys, case):
    refused, reason = case
    with pytest.raises(SystemExit, match="2"), fk.open_run(tmp_path, {}):
        refused()
    found = status(tmp_path)
    assert (found["status"], found["reason"][: len(reason)]) == ("failed", reason)
    assert capsys.readouterr().err == f"error: {found['reason'].partition(': ')[2]}\n"


OUTS = [("", "out is empty"), ("file/run", r"\[Errno 20\] Not a directory: '.*file/run'")]


@pytest.mark.parametrize(("out", "message"), OUTS)
def test_a_directory_that_cannot_be_a_run_exits_2(out, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(SystemExit, match="2"), fk.open_run(out, {}):
        raise AssertionError("no run can be there")
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file"]


def test_a_directory_in_use_exits_1_and_is_left_as_it_is(tmp_path, capsys):
    with started(tmp_path, config={"first": True}) as run:
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(SystemExit) as raised, fk.open_run(tmp_path, {"first": False}):
            raise AssertionError("two runs in one directory")
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        run.end(create(step=1))
    assert raised.value.code == 1
    assert f"error: {tmp_path} is in use by pid" in capsys.readouterr().err
    with fk.open_run(tmp_path, {"first": False}):
        pass


def test_a_run_that_has_ended_stays_so_and_needs_no_history(tmp_path, caplog):
    with pytest.raises(Unexpected), started(tmp_path) as run:  # noqa: PT012
        (tmp_path / "history.jsonl").unlink()
        (tmp_path / "history.jsonl").mkdir()
        run.end(create(step=2))
        raise Unexpected("a picture")
    assert (status(tmp_path)["status"], status(tmp_path)["step"]) == ("finished", 2)
    assert "finished could not be noted in history.jsonl" in caplog.text


def test_a_status_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path, capsys):
    with pytest.raises(Unexpected), fk.open_run(tmp_path / "run", {}):  # noqa: PT012
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("")
        raise Unexpected("bug")
    assert "status.json could not be written: [Errno" in capsys.readouterr().err


def test_the_configuration_is_kept_from_the_start_on_in_place_of_what_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b"[1]")
    config = {"model": {"dim": 8}, "out": Path("runs/a"), "rates": [0.1, None], "most": math.inf}
    with fk.open_run(tmp_path, config) as run:
        assert (tmp_path / "config.json").read_bytes() == b"[1]", "a refused run replaces nothing"
        run.start(create(), every=1).close()
    kept = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    assert kept == config | {"out": "runs/a", "most": "inf"}
    assert not (tmp_path / "config_changes.jsonl").exists()


def test_each_start_and_end_of_a_run_is_kept(tmp_path, monkeypatch, stop):
    """status.json knows the last one alone: here a stop, a failure in the loop, one in set-up."""
    monkeypatch.setattr(sys, "argv", ["my.py", "optim.lr=0.1"])
    with started(tmp_path, ready(stop)) as run:
        agree(stop, "SIGTERM")
        run.end(create(step=5))
    with pytest.raises(RuntimeError), started(tmp_path, create(step=5)):
        raise RuntimeError("oh")
    with pytest.raises(Unexpected), fk.open_run(tmp_path, {}):
        raise Unexpected("in set-up")
    with started(tmp_path, create(step=5)) as run:
        run.end(create(step=9))
    found = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00", e.pop("time")) for e in found)
    on = {"ranks": 1, "device": "cpu", "forgekit": version("forgekit"), "torch": torch.__version__}
    on |= {"parameters": 6, "arguments": ["optim.lr=0.1"]}
    at_5 = {"step": 5, "samples": 40}
    assert found == [
        {"event": "started", "step": 0, "samples": 0, **on},
        {"event": "stopped", "reason": "SIGTERM", **at_5},
        {"event": "started", **at_5, **on},
        {"event": "failed", "reason": "RuntimeError: oh", **at_5},
        {"event": "failed", "reason": "Unexpected: in set-up"},
        {"event": "started", **at_5, **on},
        {"event": "finished", "step": 9, "samples": 72, "reason": None},
    ]


def test_the_status_of_a_running_run_is_renewed(tmp_path, monkeypatch):
    """Not in each step: a file that is made durable is not free."""
    with fk.open_run(tmp_path, {}) as run:
        run.start(create(), every=1, total=9).close()
        assert not run.is_over(create(step=3))
        assert status(tmp_path)["step"] == 0
        monkeypatch.setattr(run_directory, "STATUS_EVERY_S", 0.0)
        assert not run.is_over(create(step=4))
        at = {"status": "running", "step": 4, "samples": 32, "total": 9}
        assert status(tmp_path).items() >= at.items()


def join(rank, world, out):
    """A process group that the run takes down at its end."""
    store = dist.FileStore(str(out / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _slow_to_its_end(rank, world, out):
    """Whether the groups of rank 0 outlived the run of rank 1, which comes later to its end."""
    join(rank, world, out)
    state = lay_out(nn.Linear(2, 2))
    with mock.patch.object(run_directory, "PATIENCE_S", 30.0), fk.open_run(out, {}) as run:
        run.start(state, every=1).close()
        time.sleep(rank)
        run.end(state)
        (out / f"ended-{rank}").touch()
    return (out / "ended-1").exists()


def test_groups_stay_until_all_ranks_have_ended(tmp_path):
    assert run_ranks(_slow_to_its_end, 2, tmp_path, group=False) == [True, True]
    assert status(tmp_path)["status"] == "finished"


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with started(tmp_path) as run:
        run.end(create(step=1))
    with pytest.raises(SystemExit, match="2"), fk.open_run(tmp_path, {}):
        fk.MeshSpec(tp=0)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_every_so_many_steps_and_at_the_last():
    """After a later one too: a run may be resumed with fewer steps than it has."""
    due = {(1, None): [1, 2, 3, 4, 5, 6], (0, None): [], (3, 5): [3, 5, 6]}
    for (steps, last), expected in due.items():
        assert [n for n in range(7) if fk.every(steps, create(n), last=last)] == expected


# The decisions of a loop


def ready(stop, *, step=0):
    return fk.Setup(state=create(step), step=None, loader=None, loss_fn=None, stop=stop)


def saved(out):
    return sorted(path.name for path in (out / "checkpoints").glob("step_*"))


def agree(stop, reason="enough"):
    stop.request(reason)
    for _ in range(3):
        stop.receive(torch.tensor(stop.vote()))


@pytest.fixture
def stop():
    return fk.StopSignal(signals=())


def test_a_run_is_over_at_its_last_step_or_where_the_ranks_agree_to_stop(tmp_path, stop):
    with fk.open_run(tmp_path, {}) as run, run.start(ready(stop), every=1, total=4):
        assert [run.is_over(create(step)) for step in range(6)] == [False] * 4 + [True] * 2
        stop.request("a vote of this rank is not yet one of all")
        assert not run.is_over(create(3))
        agree(stop)
        assert run.is_over(create(3))


SAID = [
    (0, 9, "the data ended after step 4 of 9"),
    (4, 4, "all 4 steps are done already"),
    (0, None, ": step 0, sample 0; 0.00 M parameters on 1 rank, set up in "),
    (0, 9, "stopped after step 4 (a budget), saved; the"),
    (0, 4, "stopped after step 4 (a budget), saved; the"),
]


@pytest.mark.parametrize(("start", "total", "says"), SAID)
def test_the_last_state_is_saved_and_its_end_is_said(start, total, says, tmp_path, stop, capsys):
    """Who is asked to stop is not finished after the last step: an evaluation may be cut short."""
    is_stopped = says.startswith("stopped")
    out = tmp_path / "deep" / "run"
    with started(out, ready(stop, step=start), total=total) as run:
        assert (run.out, run.checkpoints, run.is_writer) == (out, out / "checkpoints", True)
        at = {"status": "running", "step": start, "samples": 8 * start}
        assert status(out).items() >= at.items()
        if is_stopped:
            agree(stop, "a budget")
        assert run.end(create(4)) is not is_stopped
    assert saved(out) == ["step_00000004"] * (start == 0)
    end = {"status": "finished"} if not is_stopped else {"status": "stopped", "reason": "a budget"}
    assert status(out).items() >= (end | {"step": 4, "samples": 32}).items()
    assert says in capsys.readouterr().err


def test_what_is_saved_is_not_saved_again(tmp_path, stop):
    with started(tmp_path, ready(stop, step=2), keep=None) as run:
        run.save(create(2))
        assert saved(tmp_path) == []
        state = create()
        for step in (3, 3, 5):
            state = fk.donate(state, step=step)
            run.save(state)
        fk.checkpoints.wait_for_saves(state)
        assert saved(tmp_path) == ["step_00000003", "step_00000005"]
        before = (tmp_path / "checkpoints" / "step_00000005").stat().st_ino
        run.end(state)
        assert (tmp_path / "checkpoints" / "step_00000005").stat().st_ino == before


# Signals before the run begins


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_during_set_up_is_a_clean_stop(tmp_path, name):
    fk.run.write_status(tmp_path, "failed", reason="an earlier run")
    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(SystemExit, match="0"), fk.open_run(tmp_path, {}):
        signal.raise_signal(getattr(signal, name))
    stopped = {"status": "stopped", "reason": f"{name} during set-up"}
    assert status(tmp_path).items() >= stopped.items()
    assert signal.getsignal(getattr(signal, name)) == before


def _signalled_while_tensors_are_read(rank, world, out):
    """One rank is signalled while all read the tensors of a checkpoint."""
    join(rank, world, out)
    state = lay_out(nn.Linear(2, 2))
    fk.checkpoint_save(state, out / "checkpoints", blocking=True)

    def signal_once(frame, event, _arg):
        if event == "call" and frame.f_code.co_name == "_read_tensors":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught, fk.open_run(out, {}):  # noqa: PT012
        sys.setprofile(signal_once if rank == 1 else None)
        fk.checkpoint_load(state, out / "checkpoints")
    return caught.value.code


def test_a_signal_to_one_rank_while_all_load_is_a_clean_stop_of_all(tmp_path):
    assert run_ranks(_signalled_while_tensors_are_read, 2, tmp_path, group=False) == [0, 0]
    assert status(tmp_path)["reason"] == "SIGTERM during set-up"
