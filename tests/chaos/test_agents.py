"""Machines that come and go under torchrun alone: the others go on, on as many ranks as there are.

Here a machine is an agent of torchrun with one rank. What a restart cannot mend ends the job.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from agents import VARIABLES, Agents, rows_by_step, stretches
from chaos.scene import MOST_LOST, SEQ_LEN, Life, counting_tokens, from_page, in_short
from chaos.survival import Outcome
from pool import run_again
from runs import Job, arguments, assert_same_run, free_port, last_step, saved_step, status_of

import forgekit as fk
from forgekit.cli import recipes_folder
from forgekit.run import elastic

pytestmark = pytest.mark.timeout(300)
ROWS, GLOBAL_BATCH = 36, 6
EPOCH = ROWS // GLOBAL_BATCH
SETTINGS = {"steps": 100_000, "save_every": 5, "batch_size": "none", "model__dropout": 0.1}
SETTINGS |= {"global_batch_size": GLOBAL_BATCH, "model__vocab_size": ROWS * SEQ_LEN + 6}
GOES_ON = "the others go on"
SAME_SIZES = "bitwise that of these sizes"


@pytest.fixture
def agents(tmp_path):
    """Make agents of one run; nothing of them survives the test."""
    made, tokens = [], counting_tokens(tmp_path / "tokens", ROWS)

    def make(most, faults=None, **settings):
        given = SETTINGS | {"data__path": tokens} | settings
        notes = {"note_attempts": (str(tmp_path / "notes"), 0.05)}
        made.append(Agents(tmp_path / "run", given, most, faults=notes | (faults or {})))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check_run(agents, tmp_path):
    """Compare a run with one of the same sizes whose ranks are started one after the other."""
    starts, last = agents.starts(), last_step(agents.out)
    assert saved_step(agents.out) == last
    for ranks, until in stretches(starts, last):
        settings = agents.settings | {"out": tmp_path / "expected"}
        faults = {rank: {"end_after": until} for rank in range(ranks)}
        log = tmp_path / "expected.log"
        life = Life(arguments(**settings), log=log, ranks=ranks, faults=faults)
        assert life.end() == [0] * ranks, life.output
    assert_same_run(agents.out, tmp_path / "expected")
    rows = rows_by_step(tmp_path / "notes")
    for first in range(1, last + 2 - EPOCH, EPOCH):
        epoch = [row for step in range(first, first + EPOCH) for row in rows[step]]
        assert sorted(epoch) == list(range(0, ROWS * SEQ_LEN, SEQ_LEN))


REFUSED = {
    "a key that is none": ({"model__dmi": 8}, VARIABLES, "the configuration was refused"),
    "a layout": ({"mesh__tp": 2}, VARIABLES, "error: tp 2 = 2 does not divide 1 rank"),
    "a store of dead ranks": ({}, {}, "error: with --max-restarts=100 a restart by torchrun would"),
}


@pytest.mark.parametrize("case", in_short(REFUSED, "a key that is none", "a store of dead ranks"))
def test_what_is_refused_is_not_started_again(agents, case):
    settings, variables, message = REFUSED[case]
    run = agents(1, **settings)
    run.variables = variables
    assert run.start().end() != 0
    assert run.jobs[0].output.count(message) == 1
    assert not run.starts()


def test_a_run_that_another_process_holds_is_not_started_again(agents, tmp_path):
    run = agents(1, {"hurry": 0.1})
    with fk.run.lock_run(run.out):
        assert run.start().end() != 0
    assert run.jobs[0].output.count(f"error: {run.out} is in use by pid {os.getpid()} on host") == 1


def test_ranks_that_cannot_share_the_batch_wait_for_others_to_come_or_go(agents):
    run = agents(2, {"hurry": 0.5}, global_batch_size=3)
    run.patience_s = 5
    run.start()
    run.wait_for_steps(1)
    second = run.start()
    run.wait_for(lambda: "waits" in (status_of(run.out).get("reason") or ""), "wait")
    said = status_of(run.out)
    assert said["status"] == "stopped"
    assert "another number of ranks: global_batch_size 3 must be divisible by" in said["reason"]
    since = len(run.starts())
    run.lose(second, with_workers=True)
    run.wait_for_steps(1, since=since)
    assert run.starts()[since][1] > 0


REASONS = {
    "a signal to one": (["SIGTERM", "another rank"], True),
    "a dead launcher": (["another rank", "launcher is gone"], True),
    "a budget of one": (["another rank", "budget 60 s"], False),
    "a stop file": (["stop file here", "stop file here"], False),
}


def _is_left(rank, world, reasons):
    assert len(reasons) == world
    return elastic.is_left(reasons[rank])


@pytest.mark.parametrize(("reasons", "expected"), REASONS.values(), ids=REASONS)
def test_a_signal_means_one_machine_and_a_budget_the_run(reasons, expected):
    assert run_again(_is_left, 2, reasons) == [expected] * 2


def page():
    """The text on machines that come and go."""
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    return text.partition("## Machines that come and go")[2]


@pytest.mark.parametrize(
    ("status", "is_over"), [("running", False), ("stopped", False), ("finished", True)]
)
def test_the_loop_of_the_page_ends_with_the_run(tmp_path, status, is_over):
    fk.run.write_status(tmp_path, status, reason="HangError: the ranks lost each other")
    (pattern,) = re.findall(r"grep -q '(.*)'", page())
    assert bool(re.search(pattern, (tmp_path / "status.json").read_text())) == is_over


@pytest.mark.chaos
def test_the_commands_of_the_page_keep_a_run_going(tmp_path):
    """As they are written there, but for names and sizes."""
    tokens, out, port = counting_tokens(tmp_path / "tokens", ROWS), tmp_path / "run", free_port()
    blocks = re.findall(r"```bash\n(.*?)```", page(), re.DOTALL)[:2]
    settings = shlex.join(arguments(data__path=tokens, **SETTINGS))
    changes = {"STORE:29400": f"localhost:{port}", "29400": port, "python ": f"{sys.executable} "}
    changes |= {"torchrun ": f"{sys.executable} -m torch.distributed.run "}
    changes |= {"--nproc-per-node=8": "--nproc-per-node=1", "/shared/runs/a": str(out)}
    changes |= {"--config pretrain_64_gpus.toml": settings}
    changes |= {"pretrain.py": str(recipes_folder() / "pretrain.py")}
    store, agent = from_page("```".join(blocks), changes).split("```")
    run = Agents(out, {}, 8)
    try:
        for number, command in enumerate((store, agent, agent)):
            log = tmp_path / f"log-{number}"
            run.jobs.append(Job(["bash", "-c", command], log=log, cwd=tmp_path))
        run.wait_for_steps(2)
        run.wait_for(lambda: saved_step(out), "a checkpoint")
        since = len(run.starts())
        run.jobs[1].kill()
        run.wait_for_steps(1, since=since)
        assert run.starts()[since][1] > 0
    finally:
        run.close()


FAILING = {
    "after each step": ({"raise_after": 8}, [(2, 0), (2, 5), (2, 5)], "RuntimeError: this batch"),
    "in the set-up of one rank": ({"raise_in_set_up": 1}, [], "RuntimeError: this machine has no"),
}


@pytest.mark.parametrize("how", in_short(FAILING, "in the set-up of one rank"))
def test_a_job_that_cannot_go_on_ends_with_its_restarts(agents, how):
    fault, starts, problem = FAILING[how]
    run = agents(2, fault)
    run.least, run.restarts = 2, 2
    both = [run.start(), run.start()]
    assert all(job.end() != 0 for job in both)
    assert run.starts() == starts
    assert status_of(run.out)["status"] == "failed"
    assert re.match(problem, status_of(run.out)["reason"])


@pytest.mark.chaos
def test_an_agent_that_is_asked_to_stop_leaves_and_nothing_is_lost(agents, tmp_path, survived):
    run = agents(2)
    first, _ = run.start(), run.start()
    run.wait_for_steps(2)
    since = len(run.starts())
    first.process.send_signal(signal.SIGTERM)
    run.wait_for_steps(1, since=since)
    assert first.end() != 0
    ends = [event for event in run.history() if event["event"] == "stopped"]
    assert ends[-1]["step"] == run.starts()[since][1] > 0
    run.stop()
    check_run(run, tmp_path)
    outcome = Outcome(ended=GOES_ON, status="stopped", lost=0, after=SAME_SIZES)
    survived("SIGTERM to an agent of torchrun", outcome)


@pytest.mark.chaos
def test_the_rank_of_an_agent_that_was_taken_for_dead_gives_way(agents, tmp_path, survived):
    """It trains alone, and the others would wait for the run directory until it is done."""
    run = agents(2, {"hurry": 1.0})
    run.patience_s = 8
    first = run.start()
    run.wait_for_steps(1)
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(2 * run.patience_s)
    second = run.start()
    run.wait_for(lambda: len(run.starts()) == 2, "second start")
    assert run.history()[-2]["reason"] == "another attempt"
    first.process.send_signal(signal.SIGCONT)
    run.wait_for_steps(2, since=2)
    assert {first.process.poll(), second.process.poll()} == {None}
    run.stop()
    check_run(run, tmp_path)
    outcome = Outcome(ended=GOES_ON, status="stopped", lost=0, after=SAME_SIZES)
    survived("an agent of torchrun that stalls and is taken for dead", outcome)


KILLS = 30


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_agents_killed_at_30_random_moments_leave_the_run_of_the_same_sizes(
    agents, tmp_path, survived
):
    """Some of them in set-up, some while the others restart, some with and some without ranks."""
    chance = random.Random(0)
    run = agents(3)
    living = [run.start() for _ in range(3)]
    run.wait_for_steps(3)
    for _ in range(KILLS):
        time.sleep(chance.uniform(0, 12))
        victim = living.pop(chance.randrange(len(living)))
        run.lose(victim, with_workers=chance.random() < 0.6)
        while len(living) < 3 and (len(living) == 1 or chance.random() < 0.7):
            time.sleep(chance.uniform(0, 6))
            living.append(run.start())
    living += [run.start() for _ in range(3 - len(living))]
    run.wait_for(lambda: run.starts()[-1][0] == 3, "three ranks")
    run.wait_for_steps(3)
    run.stop()
    check_run(run, tmp_path)
    assert max(redone(tmp_path / "notes")) <= MOST_LOST
    outcome = Outcome(ended=GOES_ON, status="failed", lost=MOST_LOST, after=SAME_SIZES)
    survived("30 agents of torchrun at random moments, alone or with their ranks", outcome)


def redone(notes):
    """Steps that each start has taken again."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    attempts = list(dict.fromkeys(attempt for _, attempt, *_ in sorted(lines, key=lambda x: x[3])))
    firsts = {a: min(step for step, attempt, *_ in lines if attempt == a) for a in attempts}
    reached = 0
    for attempt in attempts:
        yield max(0, reached + 1 - firsts[attempt])
        reached = max(step for step, other, *_ in lines if other == attempt)
