"""Processes and meshes: every start, every size, and the error texts with their arithmetic."""

from __future__ import annotations

import os
import re
import socket
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from lab import SPEC, lay_out, logits_loss
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk
from forgekit.environment import identity, rendezvous
from forgekit.mesh import resolve_sizes

STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
STARTERS += ("SLURM_STEP_ID",)
MEETING = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")


@pytest.fixture(autouse=True, scope="module")
def no_group():
    """Tests of other files in this process may have left one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def environment(monkeypatch):
    """``environment(**variables)`` replaces whatever started this process."""
    for name in STARTERS + MEETING:
        monkeypatch.delenv(name, raising=False)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


# Sizes


FIT = [
    ({"dp_replicate": -1, "dp_shard": 2}, 8, (1, 4, 2, 1, 1)),
    ({"pp": 2, "cp": 3, "tp": 4}, 48, (2, 1, 2, 3, 4)),
    ({"pp": -1, "dp_shard": 2, "tp": 2}, 12, (3, 1, 2, 1, 2)),
    ({"cp": 2, "ep": 4}, 8, (1, 1, 4, 2, 1)),
]


@pytest.mark.parametrize(("spec", "world", "sizes"), FIT)
def test_sizes_fill_the_world(spec, world, sizes):
    assert resolve_sizes(fk.MeshSpec(**spec), world) == sizes


NEAREST = "8 ranks; the nearest is dp_replicate="
LEAST = "a mesh dimension must be at least 1, or -1 once (not ep)."
DO_NOT_FIT = [
    ({"dp_shard": 3}, f"dp_shard 3 = 3 does not fit {NEAREST}1, dp_shard=8."),
    ({"dp_replicate": 3}, f"dp_replicate 3 = 3 does not divide {NEAREST}2, dp_shard=4."),
    ({"tp": 3}, "tp 3 = 3 does not divide 8 ranks; that takes 6 or 9 ranks."),
    ({"ep": 3}, "ep 3 does not divide dp_shard * cp = 8; it can be one of [1, 2, 4, 8]."),
    ({"tp": 0}, f"tp is 0; {LEAST}"),
    ({"cp": -1}, "dp_shard and cp are -1; only one dimension can be."),
    ({"dp_shard": 1, "ep": -1}, f"ep is -1; {LEAST}"),
]


@pytest.mark.parametrize(("spec", "message"), DO_NOT_FIT)
def test_sizes_that_do_not_fit_say_what_would(spec, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve_sizes(fk.MeshSpec(**spec), 8)


# Who am I


def of_slurm(rank, world, local):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": world, "SLURM_LOCALID": local}


def of_torchrun(rank, world, local):
    return {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}


STEP = {"SLURM_STEP_ID": "0"}
INSIDE = of_torchrun("1", "2", "1") | STEP | of_slurm("0", "1", "0")
STARTED = {
    "alone": ({}, (0, 1, 0)),
    "torchrun": (of_torchrun("5", "8", "1"), (5, 8, 1)),
    "srun": (STEP | of_slurm("3", "4", "1"), (3, 4, 1)),
    "torchrun inside srun": (INSIDE, (1, 2, 1)),
    "a stray variable": ({"RANK": "5"}, (0, 1, 0)),
    "a batch script": (of_slurm("0", "8", "0"), (0, 1, 0)),
}


@pytest.mark.parametrize(("variables", "expected"), STARTED.values(), ids=STARTED)
def test_a_process_learns_its_place_from_what_started_it(environment, variables, expected):
    environment(**variables)
    rank, world, _ = expected
    assert fk.process_rank() == rank
    assert identity(os.environ) == expected
    with pytest.raises(ValueError, match=rf"tp 97 = 97 does not divide {world} rank"):
        fk.build_mesh(fk.MeshSpec(tp=97), device="cpu")
    assert not dist.is_initialized()


OF_A_JOB = {"SLURM_JOB_ID": "61234", "SLURM_JOB_NODELIST": "rack2-node[07-09],cpu1"}


MEETINGS = [
    ({"MASTER_ADDR": "node7", "MASTER_PORT": "29511"} | OF_A_JOB, ("node7", "29511")),
    (OF_A_JOB, ("rack2-node07", "21234")),
    ({"SLURM_JOB_NODELIST": "gpu7"}, ("gpu7", "20000")),
    ({}, ("127.0.0.1", "20000")),
]


@pytest.mark.parametrize(("given", "expected"), MEETINGS)
def test_the_meeting_point_is_what_was_given_else_the_job_s_else_this_machine(given, expected):
    assert tuple(rendezvous(given).values()) == expected


PAIR = {"RANK": "0", "WORLD_SIZE": "2"}
IMPOSSIBLE = {
    "a rank in letters": ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be an integer"),
    "a rank beyond": ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2'; ranks of WORLD_SIZE=2 proce"),
    "tasks as a list": (STEP | of_slurm("0", "2(x2)", "0"), r"SLURM_NTASKS is '2\(x2\)'; it must"),
    "no address": (PAIR | {"MASTER_ADDR": ""}, "MASTER_ADDR is ''; it names the machine of rank 0"),
    "a job in an array": (PAIR | {"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID is '12_3'; it must be"),
    "nodes cut off": (PAIR | {"SLURM_JOB_NODELIST": "gpu[1-"}, r"SLURM_JOB_NODELIST is 'gpu\[1-'"),
}


@pytest.mark.parametrize(("variables", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_process_that_cannot_be_is_refused_before_it_waits_for_others(
    environment, variables, message
):
    environment(**variables)
    with pytest.raises(ValueError, match=f"^the environment variable {message}"):
        fk.build_mesh(device="cpu")
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="names devices that may be here")
@pytest.mark.parametrize("device", ["cuda:1", "gpu", torch.device("cuda")])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(environment, device):
    environment()
    message = f"device is '{device}', but torch finds no such device here; it finds cpu. Use one"
    with pytest.raises(ValueError, match=f"^{message} of them, or leave it out to get cpu.$"):
        fk.build_mesh(device=device)
    assert not dist.is_initialized()


def _free_port():
    """A port in the range that is derived from a SLURM job's number, at which nobody listens."""
    for port in range(20_000 + os.getpid() % 10_000, 40_000):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


def _started(rank, world, variables):
    with patch.dict(os.environ, {name: str(value[rank]) for name, value in variables.items()}):
        for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
            os.environ.pop(name, None)
        mesh = fk.build_mesh(device="cpu")
        try:
            total = torch.tensor(2.0**rank)
            dist.all_reduce(total)
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            threads = torch.get_num_threads()
            found = total.item(), fk.data_ranks(mesh), fk.process_rank(), *where, threads
        finally:
            fk.shutdown()
            torch.set_num_threads(1)
    assert not dist.is_initialized()
    return found


def test_processes_of_srun_find_each_other():
    """A job's number gives the port, its first node the address."""
    port, ranks = _free_port(), (0, 1)
    job = {"SLURM_JOB_ID": port - 20_000 + 40_000_000, "SLURM_JOB_NODELIST": "localhost,other[3-5]"}
    both = {"SLURM_STEP_ID": 0, "SLURM_NTASKS_PER_NODE": 1, **job}
    variables = of_slurm(ranks, (2, 2), ranks) | {name: (n, n) for name, n in both.items()}
    for rank, found in enumerate(run_ranks(_started, 2, variables, group=False)):
        assert found == (3.0, (rank, 2), rank, "localhost", port, os.cpu_count())


# Meshes


def test_one_process_builds_a_mesh_and_ends_clean(environment):
    environment()
    for _ in range(2):
        mesh = fk.build_mesh(device="cpu")
        assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert tuple(mesh.shape) == (1, 1, 1, 1, 1)
        assert (mesh.device_type, dist.get_backend()) == ("cpu", "gloo")
        fk.shutdown()
        assert not dist.is_initialized()
    fk.shutdown()


DATA_RANKS = {
    "dp_replicate": ({"dp_replicate": 2}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    "tp": ({"tp": 2}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    "pp": ({"pp": 2, "dp_replicate": 2, "dp_shard": 1}, [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "cp and tp": ({"cp": 2, "tp": 2}, [(0, 1)] * 4),
}


def _places(rank, world):
    group, found = dist.group.WORLD, {}
    for name, (spec, _) in DATA_RANKS.items():
        found[name] = fk.data_ranks(fk.build_mesh(fk.MeshSpec(**spec), device="cpu"))
    assert dist.group.WORLD is group
    assert fk.process_rank() == rank
    return found


def test_ranks_with_the_same_samples_have_the_same_data_rank():
    """The default process group that is there already is used as it is."""
    for rank, found in enumerate(run_ranks(_places, 4)):
        assert found == {name: ranks[rank] for name, (_, ranks) in DATA_RANKS.items()}


def _again(rank, world, spec):
    counts = []
    for _ in range(3):
        state = lay_out(fk.Transformer(attrs.evolve(SPEC, vocab_size=38)), spec)
        ids = torch.arange(16).view(2, 8)
        batch = TensorDict({"input_ids": ids, "labels": ids}, [2])
        fk.reduce_totals(fk.accumulate(state, [batch] * 2, logits_loss), state)
        mesh = state.mesh
        del state
        counts.append(len(os.listdir("/proc/self/task")))
    other = fk.build_mesh(fk.MeshSpec(**spec), device="cpu")
    names = [name for name in mesh.mesh_dim_names if mesh[name].size() > 1]
    return counts, [mesh.get_group(name) is other.get_group(name) for name in names]


@pytest.mark.parametrize("spec", [{"pp": 2}, {"cp": 2}], ids=str)
def test_meshes_of_the_same_ranks_share_their_groups(spec):
    """Each group has threads as long as the process lives: a notebook builds many meshes."""
    for counts, shared in run_ranks(_again, 2, spec):
        assert counts[1] == counts[2]
        assert shared == [True]
