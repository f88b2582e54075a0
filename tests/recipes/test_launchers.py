"""One contract of all launchers: a stop in time, the same command again, exit codes, status.json.

The files that are shipped are read as their launchers read them, and the commands in them start the
real recipe, small. What plays the launcher sets its variables, sends its signals, and
asks what it asks. Torchrun reads its options itself and is played beyond that: its ranks are forked
with its variables.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from unittest import mock

import pytest
import yaml
from runs import arguments, last_step, launch, rows_of, saved_step, status_of
from torch.distributed.run import get_args_parser

from forgekit.cli import recipes_folder

LAUNCHERS = recipes_folder() / "launchers"
NODES = 2
GRACE_S = 25
STEPS = 40


def load(name):
    return yaml.safe_load((LAUNCHERS / f"{name}.yaml").read_text())


def variables_of(container):
    """Of its environment; torchrun has to end its ranks before a pod is killed."""
    found = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < container.get("grace", 30)
    return found


def trainjob():
    """Command, variables of all nodes, and those of each; the runtime tells torchrun by PET_*."""
    trainer = load("trainjob")["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    node = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
    node |= {"PET_MASTER_ADDR": "forgekit-node-0-0.forgekit", "PET_MASTER_PORT": 29400}
    node |= variables_of(trainer)
    command = trainer["command"] + trainer["args"]
    return [command] * NODES, [node | {"PET_NODE_RANK": rank} for rank in range(NODES)]


def jobset():
    """Pods that find each other by the name of the first; Kubernetes fills in $(NAME)."""
    job = load("jobset")["spec"]
    assert job["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job["replicatedJobs"]
    batch = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert batch["parallelism"] == batch["completions"] == NODES
    assert batch["backoffLimit"] == 0
    pod = batch["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    shared = variables_of(container | {"grace": pod["terminationGracePeriodSeconds"]})
    command = container["command"] + container["args"]
    words = [re.sub(r"\$\((\w+)\)", lambda m: shared[m[1]], word) for word in command]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    return [words] * NODES, [shared | {"JOB_COMPLETION_INDEX": rank} for rank in range(NODES)]


def skypilot():
    """A shell script on each node."""
    task = load("skypilot")
    assert task["num_nodes"] == NODES
    assert task["resources"]["job_recovery"].keys() == {"strategy", "max_restarts_on_errors"}
    sky = task["envs"] | {
        "SKYPILOT_NUM_NODES": NODES,
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
    }
    nodes = [sky | {"SKYPILOT_NODE_RANK": rank} for rank in range(NODES)]
    script = ["bash", "-euc", task["run"].replace("exec torchrun", "printf '%s\\n' torchrun")]
    commands = []
    for node in nodes:
        given = {"PATH": os.environ["PATH"]} | {name: str(value) for name, value in node.items()}
        commands.append(subprocess.check_output(script, env=given, text=True).splitlines())
    return commands, nodes


READ = {"trainjob": trainjob, "jobset": jobset, "skypilot": skypilot}


def check_torchrun(command, node, number):
    """Check what torchrun is told on a node."""
    assert command[0] == "torchrun"
    with mock.patch.dict(os.environ, {name: str(value) for name, value in node.items()}):
        given = get_args_parser().parse_args(command[1:])  # which reads PET_*
    assert (int(given.nnodes), int(given.nproc_per_node)) == (NODES, 8)
    assert given.max_restarts == 0, "a failure of the program is none to repeat here"
    address, port = given.master_addr, given.master_port
    if given.rdzv_endpoint:  # the nodes number themselves
        assert (given.rdzv_backend, given.rdzv_id) != ("static", "none")
        address, port = given.rdzv_endpoint.split(":")
    else:
        assert given.node_rank == number
    assert address in ("forgekit-node-0-0.forgekit", "forgekit-nodes-0-0.forgekit", "10.0.0.1")
    assert 1024 < int(port) < 65536
    assert given.training_script == "pretrain.py"
    assert given.training_script_args == ["out=s3://bucket/runs/a", "data.path=s3://bucket/tokens"]


def check_stop(start, out, ask, reason):
    """Asked to stop, a run saves in time; the same command goes on there, each step once."""
    with start() as job:
        job.wait_for(lambda: last_step(out) >= 3, "step 3")
        assert (status_of(out)["status"], status_of(out)["total"]) == ("running", STEPS)
        ask(job)
        began = time.monotonic()
        assert job.codes() == [0, 0], job.output
        assert time.monotonic() - began < GRACE_S
    stopped = status_of(out)
    assert (stopped["status"], stopped["reason"]) == ("stopped", reason)
    assert 3 <= stopped["step"] == saved_step(out) == last_step(out) < STEPS
    with start() as job:
        assert job.codes() == [0, 0], job.output
    assert [row["step"] for row in rows_of(out)] == [*range(1, STEPS + 1)]
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    started = [one["step"] for one in history if one["event"] == "started"]
    assert started == [0, stopped["step"]]
    said = status_of(out)
    assert (said["status"], said["step"], said["total"]) == ("finished", STEPS, STEPS)


@pytest.mark.parametrize("name", READ)
def test_a_launcher_starts_the_recipe_on_each_node(name):
    commands, nodes = READ[name]()
    for number, (command, node) in enumerate(zip(commands, nodes, strict=True)):
        check_torchrun(command, node, number)


def test_a_launcher_stops_a_run_in_time_and_the_same_command_goes_on(tmp_path, plain, tokens):
    """A node that is drained gets SIGTERM, and SIGKILL after its grace."""
    _, nodes = jobset()
    out, variables = tmp_path / "run", {key: str(value) for key, value in nodes[0].items()}
    settings = arguments(out=out, data__path=tokens, steps=STEPS, save_every=0)
    options = {"ranks": NODES, "variables": variables, "log": tmp_path / "log"}

    def drain(job):
        for rank in job.ranks:
            rank.send_signal(signal.SIGTERM)

    check_stop(partial(launch, plain, settings, **options), out, drain, "SIGTERM")


RAY_WORKER = """
import sys, threading
import torch, torch.distributed as dist
sys.path.insert(0, {launchers!r})
import ray_train

dist.init_process_group("gloo")  # Ray does so before it calls the function, in a thread
ended = []


def run():
    try:
        ray_train.train({{"recipe": sys.argv[1], "settings": sys.argv[2:]}})
    except Exception as error:
        ended.append(error)


thread = threading.Thread(target=run)
thread.start()
thread.join()
assert dist.is_initialized(), "Ray's group is gone"
count = torch.ones(1)
dist.all_reduce(count)  # Ray still meets in it
print("a group of", int(count), "and", *ended or ["no error"], flush=True)
sys.exit(len(ended))
"""


def test_in_a_worker_of_ray_its_group_is_used_and_its_deadline_heard(tmp_path, tokens, plain):
    """No handler of signals in a thread; ``also`` is what tells of the end, to every rank."""
    recipe, worker, out = (tmp_path / name for name in ("pretrain.py", "worker.py", "run"))
    text, deadline = plain.read_text(), tmp_path / "deadline"
    edited = f'fk.StopSignal(also=lambda: Path("{deadline}").exists() and "deadline")'
    assert text.count("fk.StopSignal()") == 1
    recipe.write_text(text.replace("fk.StopSignal()", edited))
    worker.write_text(RAY_WORKER.format(launchers=str(LAUNCHERS)))
    settings = arguments(out=out, data__path=tokens, steps=STEPS, save_every=0, data__workers=0)

    def start(*more):
        deadline.unlink(missing_ok=True)
        return launch(worker, [str(recipe), *settings, *more], log=tmp_path / "log", ranks=2)

    check_stop(start, out, lambda job: deadline.touch(), "deadline")
    assert (tmp_path / "log").read_text().count("a group of 2 and no error") == 2
    with start("optim.lr=fast") as job:
        assert job.codes() == [1, 1], "Ray would take SystemExit for a success"
        assert re.search(r"and .*pretrain.py ended with code 2; see status.json", job.output)
