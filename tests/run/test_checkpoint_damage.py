"""What happens to checkpoints in the world, on one rank and on two that have to agree on it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covering import one_at_a_time
from manifests import edit, rewrite
from ranks import run_again, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forgekit.checkpoints.directory import latest_checkpoint
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import checkpoint_save
from forgekit.ranks import CheckpointError
from forgekit.state import TrainState, donate

WORLDS = pytest.mark.parametrize("world", [1, 2])


def build(world, step=0, width=5):
    torch.manual_seed(step)
    model, mesh = nn.Linear(6, width), None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model, mesh=mesh)
    state = TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)
    return donate(state, step=step)


def weights(state):
    weight = state.model.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


def _save(rank, world, directory, *steps):
    for step in steps:
        checkpoint_save(build(world, step), directory, blocking=True)


def _load(rank, world, directory, **options):
    """Load; return the error, or the step if the weights are those of that step."""
    state = build(world, 9)
    before = weights(state)
    try:
        state = checkpoint_load(state, directory, **options)
    except CheckpointError as error:
        assert weights(state).equal(before), "a refused state was changed"
        return str(error)
    assert weights(state).equal(weights(build(world, state.step)))
    return state.step


def _load_step(rank, world, directory, step):
    return _load(rank, world, directory, step=step)


def _truncate(file):
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncate, r"has \d+ bytes instead of \d+"),
        (Path.unlink, r"is missing \(\d+ bytes expected"),
    ],
)
def test_two_ranks_agree_on_damage(tmp_path, spoil, message):
    """One rank reads the file; both pass over the checkpoint, or refuse the one asked for."""
    run_again(_save, 2, tmp_path, 1, 2)
    spoiled = tmp_path / "step_00000002" / "rank_00001.safetensors"
    spoil(spoiled)
    refusals = run_again(_load_step, 2, tmp_path, 2)
    assert len(set(refusals)) == 1
    assert re.search(re.escape(str(spoiled)) + " " + message, refusals[0])
    assert run_again(_load, 2, tmp_path) == [1, 1]


def _write(content):
    return lambda folder: (folder / "manifest.json").write_bytes(content)


def _pipe(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def _device(folder):
    """A listed shard that is a device; its size is what the manifest says."""
    (folder / "zero").symlink_to("/dev/zero")
    entry = {"bytes": 0, "crc32": "00000000"}
    rewrite(folder, lambda manifest: manifest["files"].update(zero=entry))


CHANGED = r"was changed after it was saved: its checksum is \w{12} instead of '\w{12}"
MANIFESTS = {
    "samples": (lambda f: edit(f, lambda m: m["fields"].update(samples=1000)), CHANGED),
    "tensors": (lambda f: edit(f, lambda m: m["tensors"].pop("model.weight")), CHANGED),
    "no fields": (lambda f: edit(f, lambda m: m.pop("fields")), CHANGED),
    "a file outside": (
        lambda f: rewrite(f, lambda m: m["files"].update({"../../dev/zero": {}})),
        "names a file outside the checkpoint: '../../d",
    ),
    "a device": (_device, "zero cannot be read: Not a regular file"),
    "nothing": (_write(b""), "is not JSON"),
    "brackets": (_write(b"[" * 100_000), "is not JSON"),
    "no text": (_write(b"\xff\x00"), "is not JSON"),
    "a list": (_write(b"[]"), "describes no checkpoint"),
    "a pipe": (_pipe, "cannot be read: Not a regular file"),
}


@pytest.mark.parametrize(("damage", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_is_none_is_passed_over(tmp_path, caplog, damage, message):
    _save(0, 1, tmp_path, 1, 2)
    damage(tmp_path / "step_00000002")
    assert re.search(message, _load(0, 1, tmp_path, step=2))
    assert _load(0, 1, tmp_path) == 1
    assert "step_00000002" in caplog.text
    checkpoint_save(build(1, 3), tmp_path, keep=1, blocking=True)
    assert _load(0, 1, tmp_path) == 3
    _save(0, 1, alone := tmp_path / "alone", 2)
    damage(alone / "step_00000002")
    assert re.search(rf"no whole checkpoint to load: .*{message}", _load(0, 1, alone))


@pytest.mark.parametrize("case", ["samples", "a device", "a pipe"])
def test_ranks_agree_on_a_manifest_that_is_none(tmp_path, case):
    run_again(_save, 2, tmp_path, 1, 2)
    MANIFESTS[case][0](tmp_path / "step_00000002")
    assert run_again(_load, 2, tmp_path) == [1, 1]


@pytest.mark.parametrize("case", ["samples", "a file outside", "a list"])
def test_manifests_behind_a_url_are_read_with_the_same_distrust(tmp_path, case):
    url = f"file://{tmp_path}"
    _save(0, 1, url, 1, 2)
    damage, message = MANIFESTS[case]
    damage(tmp_path / "step_00000002")
    assert re.search(message, _load(0, 1, url, step=2))
    assert _load(0, 1, url) == 1


@pytest.mark.parametrize("where", [str, "file://{}".format])
def test_a_renamed_directory_is_no_checkpoint(tmp_path, where):
    _save(0, 1, where(tmp_path), 2, 3)
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000500")
    message = r"it has 3\. Its manifest.json says step 2, so the directory was renamed; step_0"
    assert re.search(message, _load(0, 1, where(tmp_path), step=500))
    assert _load(0, 1, where(tmp_path)) == 3
    assert str(latest_checkpoint(where(tmp_path))).endswith("step_00000003")


def test_a_manifest_may_be_formatted_anew(tmp_path):
    _save(0, 1, tmp_path, 2)
    file = tmp_path / "step_00000002" / "manifest.json"
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    assert _load(0, 1, tmp_path) == 2


def test_when_all_are_damaged_no_run_starts_over(tmp_path):
    run_again(_save, 2, tmp_path, 1, 2)
    for shard in tmp_path.glob("step_*/rank_00000.safetensors"):
        _truncate(shard)
    for refusal in run_again(_load, 2, tmp_path):
        assert re.search(r"no whole checkpoint to load: .*0002/rank.*0001/rank", refusal)


def test_latest_may_point_anywhere(tmp_path):
    """It is there for people; nothing here follows it, and the next save sets it right."""
    _save(0, 1, tmp_path, 1, 2)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_00000001")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000002"
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
    state = build(world, 1, width=9000)
    checkpoint_save(state, directory, blocking=True)
    state = donate(state, step=2)
    limit = file_size_limit(size) if rank == world - 1 else nullcontext()
    with limit, pytest.raises(CheckpointError) as failure:
        checkpoint_save(state, directory, blocking=True)
    dist.barrier()
    left = sorted(os.listdir(directory))
    dist.barrier()  # the next save has a temporary directory
    checkpoint_save(state, directory, blocking=True)  # there is room again
    return str(failure.value), left, checkpoint_load(state, directory).step


@pytest.mark.parametrize(("world", "size"), one_at_a_time([1, 2], [1000, 100_000]))
def test_a_disk_that_is_full_after_some_bytes_leaves_what_was_there(tmp_path, world, size):
    for message, left, step in run_ranks(_save_to_a_full_disk, world, tmp_path / "runs", size):
        on = "rank 1: " if world == 2 else ""
        assert re.search(rf"step 2 could .*: {on}File too large", message)
        assert message.endswith("untouched: step_00000001 is good.")
        assert left == ["latest", "step_00000001"]
        assert step == 2
