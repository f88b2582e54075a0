"""However a run ends, its directory says so and nothing is left open."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import forgekit as fk
from forgekit.run import run_directory


def create(step=0):
    model = nn.Linear(2, 2)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    return fk.donate(state, step=step, samples=8 * step)


def status(out):
    return json.loads((out / "status.json").read_text())


@pytest.mark.parametrize(
    ("stopped", "expected"), [(None, "finished"), ("SIGTERM", "stopped"), ("budget", "stopped")]
)
def test_a_run_that_ended_says_where_and_why(tmp_path, capsys, stopped, expected):
    out = tmp_path / "deep" / "run"
    with fk.open_run(out, {}) as run:
        assert (run.out, run.checkpoints, run.is_writer) == (out, out / "checkpoints", True)
        with run.start(create(), every=1) as log:
            assert isinstance(log, fk.MetricsLog)
            assert status(out).items() >= {"status": "running", "step": 0}.items()
        run.end(create(step=5), stopped)
    found = status(out)
    assert found.pop("time")
    assert found == {"status": expected, "step": 5, "samples": 40, "reason": stopped}
    assert (
        f"{out}: step 0, sample 0; 0.00 M parameters on 1 rank, set up" in capsys.readouterr().err
    )


class Unexpected(Exception):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("oh"), ValueError("oh"), Unexpected("oh"), KeyboardInterrupt("oh")]
)
def test_what_goes_wrong_in_the_loop_goes_on_as_it_is(tmp_path, error):
    """A ValueError too: set-up is over, so it is a failure."""
    with pytest.raises(type(error)) as raised, fk.open_run(tmp_path, {}) as run:  # noqa: PT012
        run.start(create(step=3), every=1).close()
        raise error
    assert raised.value is error
    found = status(tmp_path)
    assert found["status"] == "failed"
    assert found["reason"] == f"{type(error).__name__}: oh"
    assert (found["step"], found["samples"]) == (3, 24)


USAGE = {
    "a size": (lambda: fk.MeshSpec(tp=0), "ValueError: tp is 0; a mesh dimension is at least 1"),
    "a file": (lambda: fk.token_dataset("nowhere"), "FileNotFoundError: "),
}


@pytest.mark.parametrize(("refused", "reason"), USAGE.values(), ids=USAGE)
def test_what_the_library_refuses_in_set_up_exits_2_with_its_message_alone(
    tmp_path, capsys, refused, reason
):
    with pytest.raises(SystemExit) as raised, fk.open_run(tmp_path, {}):
        refused()
    assert raised.value.code == 2
    assert raised.value.__suppress_context__
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["reason"].startswith(reason)
    message = status(tmp_path)["reason"].split(": ", 1)[1]
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_what_a_recipe_gets_wrong_itself_keeps_its_traceback(tmp_path, error):
    with pytest.raises(error, match="mine"), fk.open_run(tmp_path, {}):
        raise error("mine")
    assert status(tmp_path)["reason"] == f"{error.__name__}: mine"


OUTS = {
    "nothing": ("", 'out is empty; name a file or folder. "." is the current folder.'),
    "below a file": ("file/run", "file/run cannot be a run directory: Not a directory."),
    "where nobody writes": ("/proc/run", "/proc/run cannot be a run directory: No such file or"),
    "a FIFO in it": ("run", "run/metrics.jsonl is not a file, and a run keeps one of that name."),
}


@pytest.mark.parametrize(("out", "message"), OUTS.values(), ids=OUTS)
def test_a_directory_that_cannot_be_a_run_exits_2(out, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("run").mkdir()
    os.mkfifo("run/metrics.jsonl")
    with pytest.raises(SystemExit) as stop, fk.open_run(out, {}):
        raise AssertionError("no run can be there")
    assert stop.value.code == 2
    assert re.match(f"error: {message}", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "metrics.jsonl", "run"]


def test_a_rank_that_cannot_be_exits_2_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"), fk.open_run(tmp_path, {}):
        raise AssertionError("no run can be there")
    assert capsys.readouterr().err.startswith("error: the environment variable RANK is '2'; ranks")
    assert list(tmp_path.iterdir()) == []


def test_after_its_end_a_run_stays_what_it_was(tmp_path):
    with pytest.raises(Unexpected), fk.open_run(tmp_path, {}) as run:  # noqa: PT012
        run.start(create(), every=1).close()
        run.end(create(step=2))
        raise Unexpected("a picture")
    assert (status(tmp_path)["status"], status(tmp_path)["step"]) == ("finished", 2)


def test_a_status_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path, capsys):
    with pytest.raises(Unexpected), fk.open_run(tmp_path / "run", {}):  # noqa: PT012
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("")
        raise Unexpected("bug")
    assert "status.json could not be written: [Errno" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [b"{", b"[1]"])
def test_a_configuration_that_cannot_be_read_is_replaced(kept, tmp_path):
    (tmp_path / "config.json").write_bytes(kept)
    with fk.open_run(tmp_path, {"a": 1}) as run:
        run.start(create(), every=1).close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert not (tmp_path / "config_changes.jsonl").exists()


def history(out):
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_each_start_and_end_of_a_run_is_kept(tmp_path, monkeypatch):
    """status.json knows the last one alone: here a stop, a failure in the loop, a kill, the end."""
    monkeypatch.setattr(sys, "argv", ["my.py", "optim.lr=0.1"])
    with fk.open_run(tmp_path, {}) as run:
        run.start(create(), every=1).close()
        run.end(create(step=5), "SIGTERM")
    with pytest.raises(RuntimeError), fk.open_run(tmp_path, {}) as run:  # noqa: PT012
        run.start(create(step=5), every=1).close()
        raise RuntimeError("oh")
    with pytest.raises(Unexpected), fk.open_run(tmp_path, {}):
        raise Unexpected("in set-up")
    with fk.open_run(tmp_path, {}) as run:
        run.start(create(step=5), every=1).close()
        run.end(create(step=9))
    found = history(tmp_path)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00", r.pop("time")) for r in found)
    on = {"ranks": 1, "device": "cpu", "forgekit": version("forgekit"), "torch": torch.__version__}
    on |= {"parameters": 6, "arguments": ["optim.lr=0.1"]}
    assert found == [
        {"event": "started", "step": 0, "samples": 0, **on},
        {"event": "stopped", "step": 5, "samples": 40, "reason": "SIGTERM"},
        {"event": "started", "step": 5, "samples": 40, **on},
        {"event": "failed", "step": 5, "samples": 40, "reason": "RuntimeError: oh"},
        {"event": "failed", "reason": "Unexpected: in set-up"},
        {"event": "started", "step": 5, "samples": 40, **on},
        {"event": "finished", "step": 9, "samples": 72, "reason": None},
    ]


def test_a_history_that_cannot_be_written_fails_no_run(tmp_path, caplog):
    with fk.open_run(tmp_path, {}) as run:
        run.start(create(), every=1).close()
        (tmp_path / "history.jsonl").unlink()
        (tmp_path / "history.jsonl").mkdir()
        run.end(create(step=5))
    assert status(tmp_path)["status"] == "finished"
    assert "finished could not be noted in history.jsonl" in caplog.text


def test_each_configuration_can_be_found_again(tmp_path):
    """From the last one back: keys that came, went and moved into sections."""
    configs = [{"a": 1}, {"a": 2, "b": {"c": [1]}}, {"b": {"c": [1, 2]}}, {"b": {}}]
    for config in configs:
        with fk.open_run(tmp_path, config) as run:
            run.start(create(), every=1).close()
    lines = (tmp_path / "config_changes.jsonl").read_text().splitlines()
    assert [json.loads(line)["changed"] for line in lines] == [
        {"a": [1, 2], "b.c": [None, [1]]},
        {"a": [2, None], "b.c": [[1], [1, 2]]},
        {"b.c": [[1, 2], None], "b": [None, {}]},
    ]


def test_a_run_that_has_all_its_steps_says_so(tmp_path, capsys):
    with fk.open_run(tmp_path, {}) as run:
        run.start(create(step=3), every=1, total=3).close()
    assert "all 3 steps are done already" in capsys.readouterr().err


def test_a_directory_in_use_exits_1_and_is_left_as_it_is(tmp_path, capsys):
    with fk.open_run(tmp_path, {"first": True}) as run:
        run.start(create(), every=1).close()
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with pytest.raises(SystemExit) as raised, fk.open_run(tmp_path, {"first": False}):
            raise AssertionError("two runs in one directory")
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        run.end(create(step=1))
    assert raised.value.code == 1
    assert f"error: {tmp_path} is in use by pid" in capsys.readouterr().err
    with fk.open_run(tmp_path, {"first": False}):
        pass


def test_the_configuration_is_kept(tmp_path):
    config = {"model": {"dim": 8}, "out": Path("runs/a"), "rates": [0.1, None], "name": "é"}
    with fk.open_run(tmp_path, config) as run:
        assert not (tmp_path / "config.json").exists(), "a refused run must not replace it"
        run.start(create(), every=1).close()
        found = json.loads((tmp_path / "config.json").read_text())
    assert found == config | {"out": "runs/a"}


def test_the_status_of_a_running_run_is_renewed(tmp_path, monkeypatch):
    """Not in each step: a file that is made durable is not free."""
    with fk.open_run(tmp_path, {}) as run, run.start(create(), every=1, total=9):
        assert not run.is_over(create(step=3))
        assert status(tmp_path)["step"] == 0
        monkeypatch.setattr(f"{fk.run.Run.__module__}.STATUS_EVERY_S", 0.0)
        assert not run.is_over(create(step=4))
        assert status(tmp_path).items() >= {"status": "running", "step": 4, "samples": 32}.items()


def test_a_killed_run_is_not_running(tmp_path):
    assert not fk.run.is_running(tmp_path / "nowhere")
    with fk.open_run(tmp_path, {}) as run:
        assert not fk.run.is_running(tmp_path), "set-up is not over"
        run.start(create(), every=1).close()
        assert fk.run.is_running(tmp_path)
        left = (tmp_path / "status.json").read_bytes()
        run.end(create())
        assert not fk.run.is_running(tmp_path)
    (tmp_path / "status.json").write_bytes(left)  # as a kill leaves it
    assert not fk.run.is_running(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_process_groups_are_destroyed(tmp_path, fails):
    try:
        with fk.open_run(tmp_path, {}):
            fk.build_mesh(device="cpu")
            assert dist.is_initialized()
            if fails:
                raise Unexpected
    except Unexpected:
        assert fails
    assert not dist.is_initialized()


def _slow_to_its_end(rank, world, out, patience_s):
    """Whether the groups of rank 0 outlived the run of rank 1, which comes later to its end."""
    store = dist.FileStore(str(out / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(nn.Linear(2, 2), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    with mock.patch.object(run_directory, "PATIENCE_S", patience_s), fk.open_run(out, {}) as run:
        run.start(state, every=1).close()
        time.sleep(1.5 * rank)
        run.end(state)
        (out / f"ended-{rank}").touch()
    return (out / "ended-1").exists()


@pytest.mark.parametrize(("patience_s", "waits"), [(30.0, True), (0.5, False)])
def test_groups_stay_until_all_ranks_have_ended_or_for_a_few_seconds(tmp_path, patience_s, waits):
    ended = run_ranks(_slow_to_its_end, 2, tmp_path, patience_s, group=False)
    assert ended == [waits, True]
    assert status(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_under_way_is_waited_for(tmp_path, fails):
    try:
        with fk.open_run(tmp_path, {}) as run:
            fk.checkpoint_save(create(step=4), run.checkpoints)
            if fails:
                raise Unexpected
    except Unexpected:
        assert fails
    assert fk.latest_checkpoint(tmp_path / "checkpoints").name == "step_00000004"


def test_other_ranks_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with fk.open_run(tmp_path, {}) as run:
        assert not run.is_writer
        run.start(create(), every=1).close()
        run.end(create(step=1))
    with pytest.raises(SystemExit) as raised, fk.open_run(tmp_path, {}):
        fk.MeshSpec(tp=0)
    assert raised.value.code == 2
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("steps", "due"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (7, []), (0, [])])
def test_every_so_many_steps(steps, due):
    assert [step for step in range(7) if fk.every(steps, create(step))] == due


@pytest.mark.parametrize(("steps", "due"), [(3, [3, 5, 6]), (5, [5, 6]), (0, [5, 6])])
def test_every_so_many_steps_and_at_the_last(steps, due):
    """After a later one too: a run may be resumed with fewer steps than it has."""
    assert [step for step in range(7) if fk.every(steps, create(step), last=5)] == due


# The decisions of a loop


def ready(stop, *, step=0, loader=None):
    return fk.Setup(state=create(step), step=None, loader=loader, loss_fn=None, stop=stop)


def saved(out):
    return sorted(path.name for path in (out / "checkpoints").glob("step_*"))


def agree(stop, reason="enough"):
    stop.request(reason)
    for _ in range(3):
        stop.hear(torch.tensor(stop.vote()))


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


@pytest.mark.parametrize("total", [4, None])
def test_the_last_state_is_saved_and_the_run_finished(total, tmp_path, stop):
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop), every=1, total=total).close()
        assert run.end(create(4)) is True
    assert (saved(tmp_path), status(tmp_path)["status"]) == (["step_00000004"], "finished")
    assert status(tmp_path)["step"] == 4


@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_was_asked_to_stop_is_not_finished(step, tmp_path, stop, capsys):
    """Not even after its last step: an evaluation may have been cut short."""
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop), every=1, total=4).close()
        agree(stop, "a budget")
        assert run.end(create(step)) is False
    assert saved(tmp_path) == [f"step_0000000{step}"]
    found = status(tmp_path)
    assert (found["status"], found["reason"], found["step"]) == ("stopped", "a budget", step)
    assert (
        f"stopped after step {step} (a budget), saved; the same command" in capsys.readouterr().err
    )


def test_data_that_end_before_the_last_step_are_named(tmp_path, stop, capsys):
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop), every=1, total=9).close()
        assert run.end(create(4)) is True
    assert "the data ended after step 4 of 9" in capsys.readouterr().err


def test_what_is_saved_is_not_saved_again(tmp_path, stop):
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop, step=2), every=1, keep=None).close()
        run.save(create(2))
        assert saved(tmp_path) == []
        state = create()
        for step in (3, 3, 5):
            state = fk.donate(state, step=step)
            run.save(state)
        fk.run.wait_for_saves(state)
        assert saved(tmp_path) == ["step_00000003", "step_00000005"]
        before = (tmp_path / "checkpoints" / "step_00000005").stat().st_ino
        run.end(state)
        assert (tmp_path / "checkpoints" / "step_00000005").stat().st_ino == before


class Rows(list):
    def __init__(self, fingerprint, **names):
        super().__init__(range(40))
        self.fingerprint = fingerprint
        vars(self).update(names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [({}, "all"), ({"fingerprint_at": lambda samples: f"up to {samples}"}, "up to 32")],
)
def test_a_checkpoint_has_the_fingerprint_of_the_data(names, expected, tmp_path, stop):
    loader = fk.make_loader(Rows("all", **names), batch_size=4)
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop, loader=loader), every=1).close()
        run.end(create(4))
    fk.checkpoint_load(create(), tmp_path / "checkpoints", fingerprint=expected)
    with pytest.raises(fk.CheckpointError, match="was saved while training on other data"):
        fk.checkpoint_load(create(), tmp_path / "checkpoints", fingerprint="other")
    with fk.open_run(tmp_path, {}) as run:
        run.start(ready(stop, loader=loader), every=1, fingerprint="given").close()
        run.end(create(5))
    fk.checkpoint_load(create(), tmp_path / "checkpoints", fingerprint="given")


# Signals before the run begins


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT"])
def test_a_signal_during_set_up_is_a_clean_stop(tmp_path, name):
    fk.run.write_status(tmp_path, "failed", reason="an earlier run")
    before = signal.getsignal(getattr(signal, name))
    with pytest.raises(SystemExit) as caught, fk.open_run(tmp_path, {}):
        signal.raise_signal(getattr(signal, name))
    assert caught.value.code == 0
    assert status(tmp_path)["status"] == "stopped"
    assert status(tmp_path)["reason"] == f"{name} during set-up"
    assert signal.getsignal(getattr(signal, name)) == before


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Streamed(fk.TrainState):
    stream: Any = None


class Interrupting:
    """A field of a state that is signalled while a checkpoint reads or writes it."""

    def __init__(self, name=None, at=None):
        self.name, self.at = name, at

    def state_dict(self):
        return self._at("save") or {"n": 1}

    def load_state_dict(self, _state):
        self._at("load")

    def _at(self, moment):
        if self.at == moment:
            signal.raise_signal(getattr(signal, self.name))


def streamed(stream, mesh=None):
    model = nn.Linear(2, 2)
    model = model if mesh is None else fk.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters())
    return Streamed.create(model, optimizer, mesh=mesh, stream=stream)


def _stopped_at(moment, name, out):
    with pytest.raises(SystemExit) as caught, fk.open_run(out, {}) as run:
        fk.checkpoint_load(streamed(Interrupting(name, moment)), run.checkpoints)
    return caught.value.code


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_while_a_checkpoint_is_loaded_is_a_clean_stop(tmp_path, name):
    fk.checkpoint_save(streamed(Interrupting()), tmp_path / "checkpoints", blocking=True)
    assert _stopped_at("load", name, tmp_path) == 0
    assert status(tmp_path)["status"] == "stopped"
    assert status(tmp_path)["reason"] == f"{name} during set-up"


def _signalled_while_tensors_are_read(rank, world, out):
    """One rank is signalled while all read the tensors of a checkpoint."""
    store = dist.FileStore(str(out / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    state = streamed(Interrupting(), fk.build_mesh(fk.MeshSpec(), device="cpu"))
    fk.checkpoint_save(state, out / "checkpoints", blocking=True)

    def signal_once(frame, event, _arg):
        if event == "call" and frame.f_code.co_name == "_read_tensors":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGTERM)

    def load():
        if rank == 1:
            sys.setprofile(signal_once)
        fk.checkpoint_load(state, out / "checkpoints")

    with pytest.raises(SystemExit) as caught, fk.open_run(out, {}):
        load()
    return caught.value.code


def test_a_signal_to_one_rank_while_all_load_is_a_clean_stop_of_all(tmp_path):
    assert run_ranks(_signalled_while_tensors_are_read, 2, tmp_path, group=False) == [0, 0]
    assert status(tmp_path)["status"] == "stopped"
    assert status(tmp_path)["reason"] == "SIGTERM during set-up"


def test_ctrl_c_in_a_save_is_no_failed_save(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fk.checkpoint_save(streamed(Interrupting("SIGINT", "save")), tmp_path, blocking=True)


def _signalled_after_its_run(rank, world, out):
    """How a process ends that gets SIGTERM behind its run; a fork, for it ends by it."""
    child = os.fork()
    if not child:
        with fk.open_run(out, {}) as run:
            run.start(create(), every=1)
            run.end(create())
        signal.raise_signal(signal.SIGTERM)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_from_the_start_on_a_stop_signal_listens_and_nobody_after_it(tmp_path):
    with fk.open_run(tmp_path, {}) as run:
        stop = fk.StopSignal()
        with run.start(create(), every=1), stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.reason == "SIGTERM"
        run.end(create(), stopped=stop.reason)
    assert status(tmp_path)["reason"] == "SIGTERM"
    ended = run_ranks(_signalled_after_its_run, 1, tmp_path, group=False)
    assert ended == [-signal.SIGTERM]
    assert status(tmp_path)["status"] == "finished"
