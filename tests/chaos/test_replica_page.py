"""The launcher of the page on replica groups: it starts a lost group again, a refused one not."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from replica_groups import start_lighthouse
from runs import Job, arguments, last_step, status_of

import forgekit as fk
from forgekit.cli import recipes_folder

ROWS, SEQ_LEN, KILLS = 64, 16, 4
PAGE = Path(__file__).parents[2] / "docs" / "replicas.md"


def loop_of_the_page(folder):
    """As it is written there, but for names and sizes."""
    tokens, last = folder / "tokens", ROWS * SEQ_LEN
    fk.write_tokens(tokens, [np.arange(last)], vocab_size=last + 1, eos_id=last)
    (loop,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    settings = arguments(
        data__path=tokens, model__vocab_size=last + 1, steps=10**6, save_every=0, batch_size=2
    )
    changes = {
        "torchrun ": f"{sys.executable} -m torch.distributed.run ",
        "--nproc-per-node=8": "--nproc-per-node=2",
        "my.py": f"{recipes_folder() / 'replicas.py'} {shlex.join(settings)}",
        "runs/big": str(folder),
    }
    for old, new in changes.items():
        assert old in loop
        loop = loop.replace(old, new)
    return loop


def ranks_of(job):
    """Processes of a group's ranks, by rank."""
    found = {}
    for pid in job.members():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(v[5:]): pid for v in variables if v.startswith(b"RANK=")}
    return found


def wait_for_step(job, out, step):
    job.wait_for(lambda: last_step(out) >= step, f"step {step}")


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_loop_of_the_page_starts_a_lost_group_again(tmp_path):
    loop, lighthouse, jobs = loop_of_the_page(tmp_path), start_lighthouse(), {}

    def start(name, seed=0):
        command = loop.replace("group=a\n", f"group={name}\n").replace(
            " out=", f" seed={seed} out="
        )
        variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
        log = tmp_path / f"{name}.log"
        jobs[name] = Job(["bash", "-c", command], log=log, variables=variables)
        return jobs[name]

    try:
        first, second = start("a"), start("b")
        reached = 0
        for number in range(KILLS):
            wait_for_step(second, tmp_path / "b", reached + 1)
            os.kill(ranks_of(second)[number % 2], signal.SIGKILL)
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
