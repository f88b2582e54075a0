"""Whatever is killed, the saved weights have seen each message once."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from covering import some_of
from pool import RankError, run_ranks
from redis import Redis
from redis.exceptions import ConnectionError as AwayError
from rollouts import lives
from rollouts.answers import message
from rollouts.conftest import free_port

import forgekit as fk
from forgekit.rollouts.sources import RedisSource

REST = ("started", "noted", "committed")
"""Of a step; the faults of rollouts are seen at two more points."""


def life(rank: int, world: int, *options: Any) -> list[int]:
    return lives.train(*options)


@pytest.mark.parametrize(
    "point", some_of(["started", "trained", "noted", "saved", "committed"], *REST)
)
def test_a_killed_trainer_goes_on_and_trains_each_message_once(tmp_path, redis_url, redis, point):
    source = RedisSource(redis)
    for number in range(7):
        source.put(message(number))
    source.end()
    with pytest.raises(RankError, match="died"):
        run_ranks(life, 1, redis_url, str(tmp_path), 7, (point, 2))
    assert fk.latest_checkpoint(tmp_path) is not None
    (counts,) = run_ranks(life, 1, redis_url, str(tmp_path), 7)
    assert (counts, redis.xlen("rollouts")) == ([1] * 7, 0)


class Server:
    """A real server, with a file of what was written to it."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is missing; get it with: apt-get install redis-server")
        self.folder, self.port = folder, free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        options = ["--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always"]
        process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        while True:
            try:
                with Redis.from_url(self.url) as redis:
                    redis.ping()
            except AwayError:
                time.sleep(0.02)
            else:
                return process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self.start()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_hundred_kills_of_trainer_generator_and_redis_lose_nothing(tmp_path):
    total, kills = 400, 100
    server = Server(tmp_path)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["forgekit", "forgekit.rollouts.stream", "rollouts.lives"])
    done, folder = str(tmp_path / "done"), str(tmp_path / "checkpoints")
    programs = {
        "trainer": (lives.train, (server.url, folder, total)),
        "generator": (lives.generate, (server.url, total, done, 0.2)),
    }
    draw = random.Random(0)

    def start(name: str) -> Any:
        target, arguments = programs[name]
        process = forks.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

    alive = {name: start(name) for name in programs}
    try:
        for _ in range(kills):
            time.sleep(draw.uniform(0, 1.5))
            victim = draw.choice(["trainer", "generator", "redis"])
            if victim == "redis":
                server.kill()
            else:
                alive[victim].kill()
                alive[victim].join()
                alive[victim] = start(victim)
            for name, process in alive.items():
                # A kill of Redis must not end them.
                assert process.exitcode in (None, 0), (name, process.exitcode)
        assert not Path(done).exists(), "the kills came too late"
        while not Path(done).exists() or alive["trainer"].exitcode is None:
            time.sleep(0.1)
            assert alive["generator"].exitcode in (None, 0)
        assert alive["trainer"].exitcode == 0
        (counts,) = run_ranks(life, 1, server.url, folder, total)
        assert counts == [1] * total
        with Redis.from_url(server.url) as redis:
            assert redis.xlen("rollouts") == 0
            assert not redis.exists("rollouts:set_aside")
    finally:
        for process in alive.values():
            process.kill()
        server.process.kill()
        server.process.wait()
