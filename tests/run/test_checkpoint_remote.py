"""Checkpoints behind URLs: the same promises without rename, lock and symlink."""

from __future__ import annotations

import errno

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from lab import train
from ranks import run_again, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forgekit.checkpoints.directory import latest_checkpoint
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import checkpoint_save
from forgekit.ranks import CheckpointError
from forgekit.remote import urls
from forgekit.state import TrainState


def build(world=1, seed=0):
    torch.manual_seed(seed)
    model, mesh = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return TrainState.create(model, optimizer, mesh=mesh)


def everything(state):
    """Weights and moments as whole tensors, and the step."""
    found = dict(state.model.named_parameters())
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value
    whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}
    return {n: t.detach().clone() for n, t in whole.items()} | {"step": torch.tensor(state.step)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def saved(url, *steps, **options):
    """Train through ``steps``, save each, and return the state."""
    state = build()
    for step in steps:
        state = train(state, step - state.step)
        checkpoint_save(state, url, blocking=True, **options)
    return state


@pytest.fixture
def url():
    yield "memory://runs/a"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def objects(step=None):
    """Names of all objects below the URL, the random part of folders left out."""
    found = sorted(name.removeprefix("/runs/a/") for name in MemoryFileSystem.store)
    return [
        "/".join(part.partition("-")[0] for part in name.split("/"))
        for name in found
        if name != "latest" and (step is None or name.startswith(f"step_{step:08d}/"))
    ]


def shard(step):
    (name,) = (n for n in MemoryFileSystem.store if f"{step:08d}/" in n and "safetensors" in n)
    return name


WHOLE = ["data/rank_00000.safetensors", "manifest.json"]


def whole(*steps):
    return [f"step_{step:08d}/{name}" for step in steps for name in WHOLE]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What fails once is not asked again, unless a test says so."""
    monkeypatch.setattr(urls, "PATIENCE_S", 0.0)


@pytest.mark.parametrize("blocking", [True, False])
def test_resumed_training_is_bitwise_the_same(url, blocking):
    straight = train(build(), 5)
    state = train(build(), 3)
    pending = checkpoint_save(state, url, blocking=blocking)
    assert pending.wait() == latest_checkpoint(url) == "memory://runs/a/step_00000003"
    assert objects() == whole(3)
    assert MemoryFileSystem().cat_file("/runs/a/latest") == b"step_00000003"
    resumed = train(checkpoint_load(build(seed=1), url), 2)
    assert_same(everything(resumed), everything(straight))


def test_where_there_is_none_the_state_itself_comes_back(url, caplog):
    state = build()
    assert checkpoint_load(state, url) is state
    MemoryFileSystem().pipe_file("/runs/a/step_00000007/data-1/rank_00000.safetensors", b"half")
    assert latest_checkpoint(url) is None
    assert checkpoint_load(state, url + "/") is state
    assert "step_00000007 does not count: its manifest.json is missing" in caplog.text
    with pytest.raises(CheckpointError, match="memory://runs/a has no committed step 7; it has no"):
        checkpoint_load(state, url, step=7)


def test_what_retention_half_deletes_is_no_checkpoint(url, monkeypatch, caplog):
    real = MemoryFileSystem.rm

    def refuse(self, path, **options):
        if not path.endswith("manifest.json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(self, path, **options)

    saved(url, 1)
    monkeypatch.setattr(MemoryFileSystem, "rm", refuse)
    saved(url, 2, keep=1)
    assert "could not delete the old checkpoint memory://runs/a/step_00000001" in caplog.text
    assert objects() == [name for name in whole(1, 2) if name != "step_00000001/manifest.json"]
    monkeypatch.undo()
    saved(url, 3)
    assert objects() == whole(2, 3)


def test_saving_a_step_twice_replaces_it(url):
    saved(url, 2)
    other = train(build(seed=1), 2)
    checkpoint_save(other, url, blocking=True)
    assert objects() == whole(2)
    assert_same(everything(checkpoint_load(build(), url)), everything(other))


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize(("method", "calls"), [("put_file", 1), ("pipe_file", 1)])
def test_whatever_upload_fails_the_earlier_one_is_whole(url, monkeypatch, method, calls, step):
    """Also where the same step is saved again."""
    expected = everything(saved(url, 2))
    whole_one, left = getattr(MemoryFileSystem, method), [calls]

    def fails(self, *args, **options):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        return whole_one(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, method, fails)
    message = rf"step {step} could not be saved to memory://runs/a: .*step_00000002 is good"
    with pytest.raises(CheckpointError, match=message):
        checkpoint_save(train(build(seed=1), step), url, blocking=True)
    assert_same(everything(checkpoint_load(build(), url)), expected)
    monkeypatch.undo()
    saved(url, 4)  # clears what the failed save left
    assert objects() == whole(2, 4)


@pytest.mark.parametrize("method", ["put_file", "pipe_file", "info", "ls", "rm"])
def test_what_fails_for_a_moment_fails_no_save(url, monkeypatch, method):
    whole_one, left = getattr(MemoryFileSystem, method), [2]

    def fails(self, *args, **options):
        left[0] -= 1
        if left[0] >= 0:
            raise TimeoutError
        return whole_one(self, *args, **options)

    monkeypatch.setattr(urls, "PATIENCE_S", 60.0)
    monkeypatch.setattr(urls.time, "sleep", lambda _: None)
    saved(url, 1)
    monkeypatch.setattr(MemoryFileSystem, method, fails)
    saved(url, 2, keep=1)
    assert left[0] < 0
    assert objects() == whole(2)


def test_a_commit_that_is_refused_is_none(url):
    def refuse():
        raise RuntimeError("the rows of metrics are not there yet")

    saved(url, 1)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be saved .* rows of metrics are no"
    ):
        saved(url, 2, before_commit=refuse)
    assert latest_checkpoint(url) == f"{url}/step_00000001"


def test_an_upload_that_lost_bytes_is_not_committed(url, monkeypatch):
    put = MemoryFileSystem.put_file

    def lossy(self, local, remote, **options):
        put(self, local, remote, **options)
        if remote.endswith("safetensors"):
            self.pipe_file(remote, self.cat_file(remote)[:-1])

    monkeypatch.setattr(MemoryFileSystem, "put_file", lossy)
    with pytest.raises(CheckpointError, match=r"\d+ bytes have arrived instead of \d+"):
        saved(url, 1)
    assert latest_checkpoint(url) is None


def _change(change):
    name = shard(2)
    MemoryFileSystem().pipe_file(name, change(bytearray(MemoryFileSystem().cat_file(name))))


def _flip(content):
    content[len(content) // 2] ^= 1
    return bytes(content)


DAMAGES = {
    "truncated": (
        lambda: _change(lambda c: bytes(c[:-1])),
        r"has \d+ bytes instead of \d+",
    ),
    "flipped": (lambda: _change(_flip), r"safetensors has crc32 \w{8} instead of"),
    "missing": (
        lambda: MemoryFileSystem().rm(shard(2)),
        r"is missing \(\d+ bytes expected",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_skipped_and_one_asked_for_raises(url, caplog, damage):
    spoil, message = DAMAGES[damage]
    saved(url, 1, 2)
    spoil()
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(build(), url, step=2)
    state = checkpoint_load(build(seed=1), url)
    assert "skipped a damaged checkpoint: memory://runs/a/step_00000002" in caplog.text
    assert_same(everything(state), everything(train(build(), 1)))


def test_a_checkpoint_may_be_copied_to_a_disk_and_back(url, tmp_path):
    expected = everything(saved(url, 2))
    fs = MemoryFileSystem()
    fs.get("/runs/a/step_00000002", str(tmp_path / "step_00000002"), recursive=True)
    state = checkpoint_load(build(seed=1), tmp_path)
    assert_same(everything(state), expected)
    checkpoint_save(train(state, 1), tmp_path, blocking=True)
    fs.put(str(tmp_path / "step_00000003"), "/runs/b/step_00000003", recursive=True)
    assert checkpoint_load(build(seed=1), "memory://runs/b").step == 3
    saved("memory://runs/b", 4)  # clears leftovers, which this is none of
    assert checkpoint_load(build(seed=1), "memory://runs/b", step=3).step == 3


def test_what_is_no_url_is_named(tmp_path):
    with pytest.raises(ValueError, match="has the scheme 'nowhere', which is not known"):
        checkpoint_save(build(), "nowhere://runs/a")
    with pytest.raises(ValueError, match=r"s3:/b/runs looks like a URL .* Pass the URL as a str"):
        checkpoint_save(build(), type(tmp_path)("s3://b/runs"))


# Two ranks


def _save(rank, world, url, steps):
    state = train(build(world), steps)
    assert checkpoint_save(state, url).wait() == f"{url}/step_{steps:08d}"
    return everything(state)


def _load(rank, world, url):
    return everything(checkpoint_load(build(world, seed=1), url))


def test_two_ranks_save_and_any_number_loads(tmp_path):
    url = f"file://{tmp_path}/runs"
    expected = run_again(_save, 2, url, 2)[0]
    assert len(list(tmp_path.glob("runs/step_00000002/data-*/rank_0000[01].safetensors"))) == 2
    for world in (2, 1):
        for found in run_again(_load, world, url):
            assert_same(found, expected)
    one = run_again(_save, 1, url, 3)[0]
    for found in run_again(_load, 2, url):
        assert_same(found, one)


def _fail_on_one(rank, world, url):
    put = LocalFileSystem.put_file

    def full(self, local, remote, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "shard")

    LocalFileSystem.put_file = full if rank == 1 else put
    try:
        with pytest.raises(CheckpointError) as failure:
            checkpoint_save(train(build(world), 3), url, blocking=True)
    finally:
        LocalFileSystem.put_file = put
    return str(failure.value), checkpoint_load(build(world), url).step


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path):
    url = f"local://{tmp_path}/runs"
    run_again(_save, 2, url, 2)
    for message, step in run_ranks(_fail_on_one, 2, url):
        assert "rank_00001.safetensors: OSError: No space left on device" in message
        assert message.endswith("untouched: step_00000002 is good.")
        assert step == 2
    assert not list(tmp_path.glob("runs/step_00000003/manifest.json"))
