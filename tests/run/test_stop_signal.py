import errno
import fcntl
import json
import os
import queue
import signal
import threading
import time
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from lab import file_size_limit
from pool import run_ranks
from runs import launch
from tensordict import TensorDict

import forgekit as fk
from forgekit.run import stop_signal
from forgekit.run.rendezvous import HangError
from forgekit.run.status import lock_run, write_status
from forgekit.run.stop_signal import LOOK_S, StoppedError, StopSignal

LISTENED = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]


def handlers():
    return [*map(signal.getsignal, LISTENED)]


@pytest.mark.parametrize("number", LISTENED, ids=lambda number: number.name)
def test_a_signal_is_a_vote_and_nothing_else(number):
    with StopSignal() as stop:
        assert stop.vote() == 0.0
        os.kill(os.getpid(), number)
        assert stop.vote() == 1.0
        assert not stop.requested
        assert stop.reason == number.name


def test_previous_handlers_come_back_where_nobody_else_has_put_one():
    before = handlers()
    with StopSignal():
        outer = handlers()
        with StopSignal((signal.SIGTERM, signal.SIGUSR1)):
            assert [a == b for a, b in zip(handlers(), outer, strict=True)] == [0, 0, 1, 1]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert handlers() == [outer[0], signal.SIG_IGN, *outer[2:]]
        signal.signal(signal.SIGUSR1, outer[1])
    assert handlers() == before


def test_the_second_interrupt_is_immediate():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_all_ranks_stop_two_steps_after_a_request_also_who_takes_over_what_was_heard():
    """As a step does it: the votes are added up in a tensor that is used again."""
    first, second = stops = [StopSignal(()), StopSignal(())]
    votes, answers = torch.zeros((), dtype=torch.float64), []
    for number in range(8):
        if number == 3:
            second.request("enough")
        votes.fill_(first.vote() + second.vote())
        for stop in stops:
            stop.receive(votes)
        stops.append(StopSignal(()))
        stops[-1].load_state_dict(first.state_dict())
        answers.append({stop.requested for stop in stops})
    assert answers == [{False}] * 5 + [{True}] * 3
    assert {stop.reason for stop in stops} == {"another rank", "enough"}


def test_a_budget_and_a_stop_file_are_votes(tmp_path):
    file = tmp_path / "STOP"
    spent, waiting = StopSignal((), budget_s=0.0), StopSignal((), budget_s=3600, file=file)
    assert (spent.vote(), spent.reason, waiting.vote()) == (1.0, "budget 0 s", 0.0)
    file.touch()
    assert (waiting.vote(), waiting.reason) == (1.0, f"stop file {file}")
    file.unlink()
    assert waiting.vote() == 1.0


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("ten seconds")


@pytest.mark.parametrize(("answer", "reason"), [("in 30 s", "in 30 s"), (True, "notice")])
def test_what_else_asks_for_a_stop_is_a_vote(monkeypatch, answer, reason):
    monkeypatch.setattr(stop_signal, "ASK_S", 0.01)
    asked = []

    def notice():
        asked.append(threading.current_thread())
        return answer if len(asked) > 2 else [None, False][len(asked) - 1]

    with StopSignal(signals=(), also=notice) as stop:
        assert stop.vote() == 0.0
        wait_for(lambda: stop.vote() == 1.0)
        assert (len(asked), stop.reason) == (3, reason)
    assert threading.main_thread() not in asked
    wait_for(lambda: not asked[0].is_alive())


def test_a_question_that_raises_is_said_once_and_costs_no_step(monkeypatch, caplog):
    monkeypatch.setattr(stop_signal, "ASK_S", 0.01)
    both, answered = torch.tensor([True, False]), threading.Event()
    answers = [OSError("timed out"), both, SystemExit(3), OSError("again")]

    def notice():
        if answers:
            if (answer := answers.pop()) is both:  # neither true nor false
                return answer
            raise answer
        answered.wait()
        return "notice"

    with StopSignal(signals=(), also=notice) as stop:
        wait_for(lambda: not answers)
        time.sleep(0.1)
        assert stop.vote() == 0.0
        answered.set()
        wait_for(lambda: stop.vote() == 1.0)
    (said,) = caplog.messages
    assert "raised OSError: again" in said


def _orphaned(rank, world):
    """What a worker says, before and after its launcher is killed; both are forks of this rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "one"
    there, here = os.pipe()
    launcher = os.fork()
    if not launcher:
        if not os.fork():
            stop = StopSignal(())
            os.write(here, f"{stop.vote()}\n".encode())
            while not stop.vote():
                time.sleep(0.01)
            os.write(here, (stop.reason or "").encode())
            os._exit(0)
        signal.pause()
    os.close(here)
    del os.environ["TORCHELASTIC_RUN_ID"]
    with os.fdopen(there) as worker:
        before = worker.readline()
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
        return before, worker.read()


def test_a_worker_whose_launcher_died_asks_to_stop():
    assert run_ranks(_orphaned, 1, group=False) == [("0.0\n", "launcher is gone")]


class Stuck:
    """Rows, of which one never comes; the main thread is told when it waits for that one."""

    def __init__(self, at):
        self.at, self.asked = at, threading.Event()

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.at:
            self.asked.set()
            threading.Event().wait(30)
        return TensorDict({"x": torch.tensor([float(index)])})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_ends_the_wait_for_data_that_never_come(workers):
    dataset, seen = Stuck(at=5), []
    loader = fk.make_loader(dataset, batch_size=1, shuffle=False, workers=workers)

    def send():
        assert dataset.asked.wait(20)
        # Python does not see a signal that comes between its last look and a wait in C.
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def loop():
        with loader, StopSignal(patience_s=0.5) as stop:
            for batch in loader:
                seen.append(int(batch["x"]))
                stop.vote()

    threading.Thread(target=send).start()
    with pytest.raises(StoppedError, match="SIGTERM while waiting for data"):
        loop()
    assert seen == [0, 1, 2, 3, 4]


def test_a_signal_between_two_looks_for_data_ends_the_wait_too(monkeypatch):
    """There the lock of torchdata's queue is released: what ``with`` says of it is not raised."""

    def get(self, **_):
        with self.not_empty:
            self.mutex.release()
            raise StoppedError("SIGTERM while waiting for data")

    with fk.make_loader(Stuck(at=9), batch_size=1, shuffle=False, workers=1) as loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.setattr(queue.Queue, "get", get)
        with pytest.raises(StoppedError):
            next(batches)
        monkeypatch.undo()


def test_a_signal_leaves_alone_who_waits_for_something_else_and_looks_again():
    loader = fk.make_loader(Stuck(at=0), batch_size=1, shuffle=False)
    with StopSignal(patience_s=0.0) as stop:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.5 * LOOK_S)
        with pytest.raises(StoppedError):
            next(iter(loader))
        assert stop.vote() == 1


class Slow(Stuck):
    """Rows that are slow, and four of them slower than the patience."""

    def __getitem__(self, index):
        time.sleep(1.2 * LOOK_S)
        return super().__getitem__(index)


@pytest.mark.parametrize(("patience", "votes"), [(2, True), (4, False)])
def test_data_that_are_slow_are_waited_for_as_long_as_steps_go_on(patience, votes):
    """A step may be longer than the patience, too, if it reads now and then."""
    with StopSignal(patience_s=patience * LOOK_S) as stop:
        signal.raise_signal(signal.SIGTERM)
        for _ in islice(fk.make_loader(Slow(at=None), batch_size=1), 4):
            if votes:
                stop.vote()
            else:
                time.sleep(1.2 * LOOK_S)
        assert stop.vote() == 1


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
ERRORS = [
    (0.1, GLOO, True),
    (0.1, torch.distributed.DistNetworkError("Connection reset by peer"), True),
    (0.1, HangError("the ranks lost each other after step 1"), True),
    (20.0, GLOO, False),
    (0.1, RuntimeError("full"), False),
]


@pytest.mark.parametrize(("patience_s", "error", "is_stop"), ERRORS)
def test_a_failed_collective_long_after_a_signal_is_a_stop_and_nothing_else(
    patience_s, error, is_stop
):
    with (  # noqa: PT012
        pytest.raises(StoppedError if is_stop else type(error)) as caught,
        StopSignal(patience_s=patience_s),
    ):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.2)
        raise error
    assert caught.value is error or str(caught.value) == "SIGTERM, and another rank has given up"


UNCLOSED = """
import signal, sys, time
from forgekit.run.stop_signal import StopSignal
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.6)  # Python has no signal handlers any more
StopSignal(patience_s=0.3)
signal.raise_signal(signal.SIGTERM)
sys.modules["slow"] = Slow()
"""


def test_a_process_that_never_closed_it_ends_as_it_would_have(tmp_path):
    script = tmp_path / "unclosed.py"
    script.write_text(UNCLOSED)
    with launch(script, [], log=tmp_path / "log") as job:
        assert (job.end(), job.output) == (0, "")


def test_a_directory_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock_run(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"pid {os.getpid()}")
    assert f"{tmp_path} cannot be locked ({os.strerror(errno.ENOLCK)}): make sure" in caplog.text


@pytest.mark.parametrize(("size", "expected"), [(10, "running"), (4096, "failed")])
def test_a_status_that_fits_only_in_place_of_the_old_one_is_written_there(tmp_path, size, expected):
    """No new file can be made, as on a disk without room; what does not fit leaves the old one."""
    write_status(tmp_path, "running", step=3)
    (tmp_path / f".status.json.{os.getpid()}").mkdir()  # in the way of the new one
    with (
        file_size_limit(size),
        nullcontext() if size == 4096 else pytest.raises(OSError, match="too large"),
    ):
        write_status(tmp_path, "failed", step=4)
    assert json.loads((tmp_path / "status.json").read_text())["status"] == expected
