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


def load(name):
    return yaml.safe_load((LAUNCHERS / f"{name}.yaml").read_text())


def trainjob():
    """Command, variables of all nodes, and those of each; the runtime tells torchrun by PET_*."""
    job = load("trainjob")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    node = {"PET_NNODES": trainer["numNodes"], "PET_NPROC_PER_NODE": trainer["numProcPerNode"]}
    node |= {"PET_MASTER_ADDR": "forgekit-node-0-0.forgekit", "PET_MASTER_PORT": 29400}
    node |= {variable["name"]: variable["value"] for variable in trainer["env"]}
    assert int(node["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 30, "what a pod has by default"
    nodes = [node | {"PET_NODE_RANK": rank} for rank in range(NODES)]
    return trainer["command"] + trainer["args"], nodes


def jobset():
    """Pods that find each other by the name of the first; Kubernetes fills in $(NAME)."""
    job = load("jobset")
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job["spec"]["replicatedJobs"]
    batch = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert batch["parallelism"] == batch["completions"] == NODES
    assert batch["backoffLimit"] == 0
    pod = batch["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    shared = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(shared["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    words = [
        re.sub(r"\$\((\w+)\)", lambda m: shared[m[1]], word)
        for word in container["command"] + container["args"]
    ]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    return words, [shared | {"JOB_COMPLETION_INDEX": rank} for rank in range(NODES)]


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
    script = task["run"].replace("exec torchrun", "printf '%s\\n' torchrun")
    commands = [
        subprocess.run(
            ["bash", "-euc", script],
            env={"PATH": os.environ["PATH"]} | {name: str(n) for name, n in node.items()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for node in nodes
    ]
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


def codes_of(job):
    """Exit codes of the ranks, once nothing is left of them."""
    job.end()
    return [rank.wait() for rank in job.ranks]


def check_finished(out, stopped_at, steps):
    """Each step once, in two starts, of which the second goes on where the first has saved."""
    assert [row["step"] for row in rows_of(out)] == [*range(1, steps + 1)]
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [(one["event"], one["step"]) for one in history] == [
        ("started", 0),
        ("stopped", stopped_at),
        ("started", stopped_at),
        ("finished", steps),
    ]
    said = status_of(out)
    assert (said["status"], said["step"], said["total"]) == ("finished", steps, steps)


@pytest.mark.parametrize("name", READ)
def test_a_launcher_starts_the_recipe_on_each_node(name):
    commands, nodes = READ[name]()
    commands = commands if name == "skypilot" else [commands] * NODES
    for number, (command, node) in enumerate(zip(commands, nodes, strict=True)):
        check_torchrun(command, node, number)


@pytest.fixture
def settings(tmp_path, tokens):
    """Arguments of a short run into ``run``."""
    return arguments(out=tmp_path / "run", data__path=tokens, steps=20, save_every=0)


def test_a_launcher_stops_a_run_in_time_and_the_same_command_goes_on(tmp_path, plain, settings):
    """A node that is drained gets SIGTERM, and SIGKILL after its grace."""
    _, nodes = jobset()
    out, variables = tmp_path / "run", {key: str(value) for key, value in nodes[0].items()}
    started = partial(launch, plain, settings, ranks=NODES, variables=variables)
    with started(log=tmp_path / "log") as job:
        job.wait_for(lambda: last_step(out) >= 3, "step 3")
        assert (status_of(out)["status"], status_of(out)["total"]) == ("running", 20)
        for rank in job.ranks:
            rank.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert codes_of(job) == [0, 0], job.output
        assert time.monotonic() - began < GRACE_S
    stopped = status_of(out)
    assert (stopped["status"], stopped["reason"]) == ("stopped", "SIGTERM")
    assert 3 <= stopped["step"] == saved_step(out) == last_step(out) < 20
    with started(log=tmp_path / "log") as job:
        assert job.end() == 0, job.output
    check_finished(out, stopped["step"], 20)


def test_exit_codes_tell_a_mistake_from_a_failure(tmp_path, plain, settings):
    """2 is what no restart mends; 1 may be a lost node, and the same command goes on."""
    for changed, code, message in (
        ("data.path=/nowhere", 2, "/nowhere"),
        ("optim.lr=1e38", 1, "bad step"),
    ):
        log = tmp_path / f"log{code}"
        with launch(plain, [*settings, changed], log=log, ranks=NODES) as job:
            assert codes_of(job) == [code] * NODES, job.output
            assert message in job.output


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


def in_ray(folder, recipe, settings):
    """Two workers, as Ray starts them."""
    worker = folder / "worker.py"
    worker.write_text(RAY_WORKER.format(launchers=str(LAUNCHERS)))
    words = [str(recipe), *settings]
    return launch(worker, words, log=folder / "log", ranks=2, cwd=folder)


def test_in_a_worker_of_ray_its_group_is_used_and_its_deadline_heard(tmp_path, tokens, plain):
    """No handler of signals in a thread; ``also`` is what tells of the end, to every rank."""
    recipe = tmp_path / "pretrain.py"
    text = plain.read_text()
    edited = 'fk.StopSignal(also=lambda: Path("deadline").exists() and "deadline")'
    assert text.count("fk.StopSignal()") == 1
    recipe.write_text(text.replace("fk.StopSignal()", edited))
    out, steps = tmp_path / "run", 40
    settings = arguments(out=out, data__path=tokens, steps=steps, save_every=0, data__workers=0)

    with in_ray(tmp_path, recipe, settings) as job:
        job.wait_for(lambda: last_step(out) >= 3, "step 3")
        (tmp_path / "deadline").touch()
        assert codes_of(job) == [0, 0], job.output
        assert job.output.count("a group of 2 and no error") == 2
    stopped = status_of(out)
    assert (stopped["status"], stopped["reason"]) == ("stopped", "deadline")
    assert stopped["step"] == saved_step(out) == last_step(out)
    (tmp_path / "deadline").unlink()
    with in_ray(tmp_path, recipe, settings) as job:
        assert codes_of(job) == [0, 0], job.output
    check_finished(out, stopped["step"], steps)
    with in_ray(tmp_path, recipe, [*settings, "optim.lr=fast"]) as job:
        assert codes_of(job) == [1, 1], "Ray would take SystemExit for a success"
        assert re.search(r"and .*pretrain.py ended with code 2; see status.json", job.output)
