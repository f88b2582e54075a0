"""The launcher of the page on replica groups: it starts a lost group again, a refused one not."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from chaos.scene import SEQ_LEN, counting_tokens, from_page
from replica_groups import start_lighthouse
from runs import Job, arguments, last_step, rank_of, status_of

from forgekit.cli import recipes_folder

ROWS, KILLS = 64, 4
PAGE = Path(__file__).parents[2] / "docs" / "replicas.md"


def loop_of_the_page(folder):
    """As it is written there, but for names and sizes."""
    tokens = counting_tokens(folder / "tokens", ROWS)
    (loop,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    sizes = {"model__vocab_size": ROWS * SEQ_LEN + 1, "steps": 10**6, "batch_size": 2}
    settings = arguments(data__path=tokens, save_every=0, **sizes)
    changes = {"torchrun ": f"{sys.executable} -m torch.distributed.run ", "runs/big": str(folder)}
    changes |= {"my.py": f"{recipes_folder() / 'replicas.py'} {shlex.join(settings)}"}
    changes |= {"--nproc-per-node=8": "--nproc-per-node=2"}
    return from_page(loop, changes)


def wait_for_step(job, out, step):
    job.wait_for(lambda: last_step(out) >= step, f"step {step}")


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_loop_of_the_page_starts_a_lost_group_again(tmp_path):
    loop, lighthouse, jobs = loop_of_the_page(tmp_path), start_lighthouse(), {}

    def start(name, seed=0):
        given = {"group=a\n": f"group={name}\n", " out=": f" seed={seed} out="}
        command = from_page(loop, given)
        variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
        log = tmp_path / f"{name}.log"
        jobs[name] = Job(["bash", "-c", command], log=log, variables=variables)
        return jobs[name]

    try:
        first, second = start("a"), start("b")
        reached = 0
        for number in range(KILLS):
            wait_for_step(second, tmp_path / "b", reached + 1)
            (victim,) = (pid for pid in second.members() if rank_of(pid) == number % 2)
            os.kill(victim, signal.SIGKILL)
            reached = last_step(tmp_path / "b")
        wait_for_step(second, tmp_path / "b", reached + 1)
        wait_for_step(first, tmp_path / "a", reached + 1)
        stranger = start("c", seed=1)
        assert stranger.end() == 0
        reason = status_of(tmp_path / "c")["reason"]
        assert "this group cannot join: the groups have seed 0, this one 1." in reason
        assert stranger.output.count("set up in") == 1
    finally:
        for job in jobs.values():
            job.kill()
        lighthouse.shutdown()
