"""What happens to checkpoints in the world, on one rank and on two that have to agree on it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from contextlib import contextmanager, nullcontext

import pytest
import torch.distributed as dist
from covering import one_at_a_time
from pool import run_again, run_ranks
from saved import assert_same, build, edit, everything, rewrite, truncate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forgekit as fk


def _save(rank, world, directory, *steps):
    for step in steps:
        fk.checkpoint_save(build(world, step, step=step), directory, blocking=True)


def _load(rank, world, directory, step=None):
    """Load; return the error, or the step if the weights are those of that step."""
    state = build(world, 9)
    before = everything(state)
    try:
        state = fk.checkpoint_load(state, directory, step=step)
    except fk.CheckpointError as error:
        assert_same(everything(state), before)
        return str(error)
    assert_same(everything(state), everything(build(world, state.step, step=state.step)))
    return state.step


def test_two_ranks_agree_on_damage(tmp_path):
    """One rank reads the file; both pass over the checkpoint, or refuse the one asked for."""
    run_again(_save, 2, tmp_path, 1, 2)
    (spoiled := tmp_path / "step_00000002" / "rank_00001.safetensors").unlink()
    refusals = run_again(_load, 2, tmp_path, 2)
    assert len(set(refusals)) == 1
    assert f"{spoiled} is missing" in refusals[0]
    assert run_again(_load, 2, tmp_path) == [1, 1]
    truncate(tmp_path / "step_00000001" / "rank_00000.safetensors")
    for refusal in run_again(_load, 2, tmp_path):
        assert re.search(r"no whole checkpoint to load: .*0002/rank.*0001/rank", refusal)


def _write(content):
    return lambda folder: (folder / "manifest.json").write_bytes(content)


MANIFESTS = {
    "samples": (
        lambda folder: edit(folder, lambda manifest: manifest["fields"].update(samples=1000)),
        r"was changed after it was saved: its checksum is \w{12}",
    ),
    "no text": (_write(b"\xff\x00"), "is not JSON"),
    "a list": (_write(b"[]"), "describes no checkpoint"),
    "renamed": (
        lambda folder: rewrite(folder, lambda manifest: manifest.update(step=1)),
        "says step 1, so the directory was renamed",
    ),
    "a file elsewhere": (
        lambda folder: rewrite(folder, lambda manifest: manifest.update(folder="../../b")),
        "names a file outside the checkpoint: '../../b'",
    ),
    "a count below zero": (
        lambda folder: rewrite(folder, lambda manifest: manifest["fields"].update(samples=-4)),
        "has a step or a number of samples below zero",
    ),
}


@pytest.mark.parametrize(("damage", "message"), MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize("where", [str, "file://{}".format], ids=["path", "url"])
def test_a_manifest_that_is_none_is_passed_over(tmp_path, caplog, damage, message, where):
    _save(0, 1, where(tmp_path), 1, 2)
    damage(tmp_path / "step_00000002")
    assert re.search(message, _load(0, 1, where(tmp_path), step=2))
    assert _load(0, 1, where(tmp_path)) == 1
    assert str(fk.latest_checkpoint(where(tmp_path))).endswith("step_00000001")
    assert "step_00000002" in caplog.text
    fk.checkpoint_save(build(seed=3, step=3), where(tmp_path), keep=1, blocking=True)
    assert _load(0, 1, where(tmp_path)) == 3
    assert (tmp_path / "step_00000002").exists()  # kept and not counted
    _save(0, 1, alone := where(tmp_path / "alone"), 2)
    damage(tmp_path / "alone" / "step_00000002")
    assert re.search(rf"no whole checkpoint to load: .*{message}", _load(0, 1, alone))


def test_ranks_agree_on_a_manifest_that_is_none(tmp_path):
    run_again(_save, 2, tmp_path, 1, 2)
    MANIFESTS["samples"][0](tmp_path / "step_00000002")
    assert run_again(_load, 2, tmp_path) == [1, 1]


def test_pipes_in_a_checkpoint_do_not_hang(tmp_path):
    _save(0, 1, tmp_path, 1, 2)
    for path in [*(tmp_path / "step_00000002").iterdir()]:
        path.unlink()
        os.mkfifo(path)
    os.mkfifo(tmp_path / "step_00000003")
    assert "Not a regular file" in _load(0, 1, tmp_path)


def test_a_manifest_may_be_formatted_anew_and_latest_may_point_anywhere(tmp_path):
    """``latest`` is there for people; nothing follows it, and the next save sets it right."""
    _save(0, 1, tmp_path, 1, 2)
    file = tmp_path / "step_00000002" / "manifest.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_00000001")
    assert _load(0, 1, tmp_path) == 2
    _save(0, 1, tmp_path, 3)
    assert os.readlink(tmp_path / "latest") == "step_00000003"


@contextmanager
def file_size_limit(size):
    """Let every write that would make a file longer fail, as on a disk without more room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _save_to_a_full_disk(rank, world, directory, size):
    model, mesh = nn.Linear(6, 9000), None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    fk.checkpoint_save(state, directory, blocking=True)
    state = fk.donate(state, step=2)
    limit = file_size_limit(size) if rank == world - 1 else nullcontext()
    with limit, pytest.raises(fk.CheckpointError) as failure:
        fk.checkpoint_save(state, directory, blocking=True)
    dist.barrier()
    left = sorted(os.listdir(directory))
    dist.barrier()  # the next save has a temporary directory
    fk.checkpoint_save(state, directory, blocking=True)  # there is room again
    return str(failure.value), left, fk.checkpoint_load(state, directory).step


@pytest.mark.parametrize(("world", "size"), one_at_a_time([1, 2], [1000, 100_000]))
def test_a_disk_that_is_full_after_some_bytes_leaves_what_was_there(tmp_path, world, size):
    for message, left, step in run_ranks(_save_to_a_full_disk, world, tmp_path / "runs", size):
        on = "rank 1: " if world == 2 else ""
        assert re.search(rf"step 2 could .*: {on}File too large", message)
        assert message.endswith("untouched: step_00000000 is good.")
        assert left == ["latest", "step_00000000"]
        assert step == 2
