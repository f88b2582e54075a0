"""A run from and to a bucket, killed at any moment, goes on from a fresh folder on any machine."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest
from agents import VARIABLES, Agents
from buckets import FAULTS, open_bucket
from chaos.scene import STANDARD, Life, resumed_step
from chaos.survival import Outcome
from runs import arguments, assert_same_run, last_step, saved_step, status_of

URL = "s3://bucket/run"
# A killed run keeps its lease so long; on another machine the next start waits for it.
STORE = {"lease.PERIOD_S": 3.0, "mirror.EVERY_S": 0.2}


class Lives:
    """Lives of one run from and to a bucket, each in a fresh folder, as on another machine."""

    def __init__(self, bucket, tokens, folder):
        self.bucket, self.tokens, self.folder, self.lives = bucket, tokens, folder, []

    def live(self, *, ranks=1, faults=None, **settings):
        number = len(self.lives)
        given = STANDARD | {"data__path": self.tokens, "out": URL} | settings
        variables = self.bucket.variables | {"FORGEKIT_CACHE": str(self.folder / f"{number}")}
        ours = {rank: {"store": STORE, **(faults or {}).get(rank, {})} for rank in range(ranks)}
        options = {"log": self.folder / f"{number}.log", "faults": ours, "variables": variables}
        self.lives.append(Life(arguments(**given), ranks=ranks, **options))
        return self.lives[-1]

    def copy(self):
        """What the bucket has, as a local run directory."""
        return self.bucket.copy(URL, self.folder / "copy")


@pytest.fixture
def lives(tokens, tmp_path):
    with open_bucket() as bucket:
        place = Lives(bucket, bucket.upload(tokens, "tokens"), tmp_path)
        yield place
        for life in place.lives:
            life.kill()


def test_killed_on_two_ranks_it_goes_on_from_the_bucket(lives, undisturbed):
    settings = {"steps": 6, "save_every": 2}
    life = lives.live(ranks=2, faults={0: {"die_alone_after": 5}}, **settings)
    assert -signal.SIGKILL in life.end(), life.output
    copy = lives.copy()
    saved = saved_step(copy)
    assert last_step(copy) >= saved, "rows are there before a checkpoint counts"
    assert status_of(copy)["status"] == "running"
    life = lives.live(ranks=2, **settings)
    assert life.end() == [0, 0], life.output
    assert resumed_step(life) == saved
    copy = lives.copy()
    assert status_of(copy)["status"] == "finished"
    assert (copy / "checkpoints" / "latest").read_text() == "step_00000006"
    assert not (copy / ".lease").exists()
    assert_same_run(copy, undisturbed(2, **settings))


class AgentsOfBucket(Agents):
    """Agents on machines that share nothing but a bucket; ``out`` is a copy of what is there."""

    place: Lives

    def start(self):
        machine = {"FORGEKIT_CACHE": str(self.place.folder / f"machine-{len(self.jobs)}")}
        self.variables = VARIABLES | self.place.bucket.variables | machine
        return super().start()

    def wait_for(self, condition, what):
        def holds():
            time.sleep(0.3)
            self.place.copy()
            return condition()

        super().wait_for(holds, what)


@pytest.fixture
def agents(lives, tmp_path):
    """Two agents whose run is in a bucket."""
    settings = STANDARD | {"steps": 100_000, "data__path": lives.tokens, "out": URL}
    faults = {"store": STORE, "hurry": 0.5, "note_attempts": (str(tmp_path / "notes"), 0.1)}
    run = AgentsOfBucket(tmp_path / "copy", settings, 2, patience_s=8, faults=faults)
    run.place = lives
    yield run
    run.close()


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_stalled_agent_gives_way_and_a_lost_one_is_missed_in_the_bucket(agents, lives):
    """The lost machine is that of rank 0, which held the run."""
    both = [agents.start()]
    agents.wait_for_steps(1)
    both[0].process.send_signal(signal.SIGSTOP)
    time.sleep(2 * agents.patience_s)
    both.append(agents.start())
    agents.wait_for(lambda: len(agents.starts()) == 2, "second start")
    assert agents.history()[-2]["reason"] == "another attempt"
    both[0].process.send_signal(signal.SIGCONT)
    agents.wait_for_steps(2, since=2)
    agents.wait_for(lambda: saved_step(agents.out) > agents.starts()[-1][1], "a checkpoint")
    holder = (agents.out / ".lease").read_text().split()[1]
    (first,) = (job for job in both if int(holder) in job.members())
    since = len(agents.starts())
    agents.lose(first, with_workers=True)
    newest = saved_step(lives.copy())
    agents.wait_for_steps(1, since=since)
    assert agents.starts()[since] == (1, newest)
    agents.stop()
    assert status_of(lives.copy())["status"] == "stopped"
    assert saved_step(agents.out) == last_step(agents.out) > newest


@pytest.mark.chaos
@pytest.mark.timeout(3000)
def test_killed_thirty_times_with_a_store_that_fails(lives, undisturbed, survived):
    numbers = random.Random(7)
    network = random.Random(8)
    settings = {"steps": 160, "save_every": 4}
    share = {"PUT": 0.1}

    def fault(method, path):
        return network.choice(FAULTS) if network.random() < share.get(method, 0.03) else None

    lives.bucket.fault = fault
    newest, ended = 0, Counter()
    for _ in range(30):
        call = int(numbers.uniform(0, 2_000_000))
        life = lives.live(faults={0: {"die_at_call": call}}, **settings)
        codes = life.end()
        assert codes in ([-signal.SIGKILL], [0]), life.output
        ended["killed" if codes[0] else "finished"] += 1
        if ", set up in " in life.output:
            ended["set up"] += 1
            assert resumed_step(life) == newest, life.output
        copy = lives.copy()
        saved = saved_step(copy)
        assert saved >= newest, "what was committed is gone"
        assert last_step(copy) >= saved, "rows that a checkpoint counts are gone"
        assert last_step(copy) - saved <= 2 * settings["save_every"]
        newest = saved
    life = lives.live(**settings)
    assert life.end() == [0], life.output
    assert_same_run(lives.copy(), undisturbed(1, **settings))
    assert ended["killed"] >= 25
    assert ended["set up"] >= 10
    assert set(lives.bucket.done) == set(FAULTS)
    outcome = Outcome(ended="killed", status="running", lost=2 * settings["save_every"])
    survived("to and from a bucket that fails, at 30 random moments", outcome)
