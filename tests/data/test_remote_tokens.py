"""Token files in a bucket: the rows of a local copy, from blocks that are verified and bounded."""

from __future__ import annotations

import inspect
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest
import s3fs
import torch
from buckets import open_bucket
from pool import run_ranks
from runs import arguments, rows_of, run_here

import forgekit as fk
from forgekit.data import cached_bins, open_tokens, prepare, token_documents
from forgekit.remote import block_cache
from forgekit.remote.urls import UrlError
from forgekit.run.stop_signal import StoppedError

SEQ_LEN, SHARD_TOKENS = 32, 300


def documents(seed, count=80):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 50, rng.integers(0, 90)) for _ in range(count)]


def write(path, seed=0, **options):
    sizes = {"vocab_size": 50, "eos_id": 0, "shard_tokens": SHARD_TOKENS}
    return fk.write_tokens(path, documents(seed), **{**sizes, **options})


@pytest.fixture(scope="module")
def server():
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(server):
    yield server
    server.heal()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two token files, the second with held-out documents and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("tokens")
    write(folder / "a")
    write(folder / "b", seed=1)
    write(folder / "b" / "heldout", seed=2)
    (folder / "b" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def url(server, folder):
    return server.upload(folder, "tokens")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "blocks"


def windows(where):
    return fk.token_dataset(f"{where}/a", SEQ_LEN)


def documents_apart(where):
    return fk.token_dataset(open_tokens(f"{where}/b"), SEQ_LEN, doc_ids=True)


def packed(where, name="b"):
    file = open_tokens(f"{where}/{name}")
    return fk.packed_dataset(file, fk.pack(np.diff(file.offsets), SEQ_LEN))


def mixed(where):
    parts = {name: packed(where, name) for name in "ab"}
    phase = fk.Phase(start=40, weights={"a": 0})
    sizes = {name: len(part) for name, part in parts.items()}
    return fk.mixture_dataset(parts, fk.make_order(sizes, seed=5, phases=[phase]))


def held_out(where):
    return packed(where).held_out()


def batches(dataset, count=12, **options):
    with fk.make_loader(dataset, 4, seed=1, **options) as loader:
        return [batch.clone() for batch, _ in zip(loader, range(count), strict=False)]


def assert_same(batches, expected):
    assert len(batches) == len(expected) > 0
    for batch, reference in zip(batches, expected, strict=True):
        assert batch.keys() == reference.keys()
        for key in reference.keys():  # noqa: SIM118
            assert torch.equal(batch[key], reference[key]), key


@pytest.mark.parametrize("make", [windows, documents_apart, packed, mixed, held_out])
def test_rows_order_and_fingerprint_are_those_of_a_local_copy(folder, url, make):
    local, remote = make(folder), make(url)
    assert remote.fingerprint == local.fingerprint
    for options in ({}, {"rank": 1, "world": 2, "start": 13, "workers": 2}):
        assert_same(batches(remote, **options), batches(local, **options))


def test_a_file_of_many_blocks_reads_like_its_copy_and_each_block_is_fetched_once(bucket, tmp_path):
    long = np.random.default_rng(3).integers(1, 50, 1_300_000)
    local = fk.write_tokens(tmp_path / "c", [long], vocab_size=50, eos_id=0, shard_tokens=700_000)
    remote = open_tokens(bucket.upload(tmp_path / "c", "many"))
    before = bucket.requests
    for start, stop in [(0, 3), (262_000, 262_300), (699_990, 700_010), (1_299_000, 1_300_001)]:
        assert remote.read(start, stop).tolist() == local.read(start, stop).tolist()
        assert remote.read(start, stop).tolist() == local.read(start, stop).tolist()
    assert bucket.requests - before == 5
    assert remote.read(0, 1_300_001).tolist() == local.read(0, 1_300_001).tolist()
    again = open_tokens("s3://bucket/many", verify=True)
    assert (again.offsets.tolist(), again.fingerprint) == ([0, 1_300_001], local.fingerprint)
    assert bucket.requests - before == 6 + 3  # six blocks; the index (two), the listing, no offsets


def test_documents_bins_and_epochs_come_from_a_url(folder, url, tmp_path):
    local, remote = open_tokens(folder / "b"), open_tokens(f"{url}/b")
    for ours, theirs in zip(token_documents(f"{url}/b"), token_documents(local), strict=True):
        assert ours.tolist() == theirs.tolist()
    bins = cached_bins(tmp_path / "bins", remote, SEQ_LEN)
    assert bins.path == cached_bins(tmp_path / "bins", local, SEQ_LEN).path


@pytest.mark.parametrize("blocks", [0, 3])
def test_the_cache_is_bounded_and_rows_do_not_depend_on_it(folder, url, cache, monkeypatch, blocks):
    """A block is a shard of 600 bytes; the offsets of 648 are mapped when the cache drops them."""
    monkeypatch.setenv("FORGEKIT_CACHE_GIB", f"{blocks * 700 / 2**30:.10f}")
    remote, sizes = windows(url), []
    keep = block_cache.BlockCache.keep

    def kept(self, *block):
        keep(self, *block)
        sizes.append(sum(file.stat().st_size for file in cache.iterdir()))

    monkeypatch.setattr(block_cache.BlockCache, "keep", kept)
    assert_same(batches(remote, 10), batches(windows(folder), 10))
    assert 0 < max(sizes) <= max(blocks * 700, 648)
    assert len(sizes) > 12  # there are no more shards, so some came again


def test_blocks_used_longest_ago_go_first(cache, monkeypatch):
    monkeypatch.setenv("FORGEKIT_CACHE_GIB", f"{351 / 2**30:.10f}")
    blocks = block_cache.BlockCache()
    names = [block_cache._checksum(bytes([n]) * 100) for n in range(4)]
    for at, name in enumerate(names[:3]):
        blocks.keep(name, bytes([at]) * 100)
        os.utime(cache / name, (at, at))
    blocks.opened(names[0]).close()
    blocks.keep(names[3], bytes([3]) * 100)
    assert [(blocks.folder / name).exists() for name in names] == [True, False, True, True]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: bytes([b[0] ^ 1]) + b[1:]])
def test_a_damaged_block_of_the_cache_is_fetched_again(folder, url, cache, damage):
    batches(windows(url))
    for block in cache.iterdir():
        block.write_bytes(damage(block.read_bytes()))
    assert_same(batches(windows(url)), batches(windows(folder)))


def test_a_flipped_bit_and_a_replaced_object_are_refused(bucket, tmp_path):
    url = bucket.upload(write(tmp_path / "a").path, "changing")
    remote = open_tokens(url)
    assert remote.read(0, 10).tolist() == open_tokens(tmp_path / "a").read(0, 10).tolist()
    fs = s3fs.S3FileSystem()
    content = bytearray(fs.cat_file(f"{url}/shard_00001.npy"))
    content[200] ^= 1
    fs.pipe_file(f"{url}/shard_00001.npy", bytes(content))
    message = r"changing/shard_00001.npy differs from its checksum in block 0: it was replaced"
    with pytest.raises(ValueError, match=message):
        remote.read(SHARD_TOKENS, SHARD_TOKENS + 1)
    with pytest.raises(ValueError, match=message):
        open_tokens(url, verify=True)


def test_incomplete_uploads_are_refused_when_they_are_opened(bucket, tmp_path):
    fs, file = s3fs.S3FileSystem(), write(tmp_path / "a")
    url = bucket.upload(file.path, "torn")
    shard = f"{url}/shard_00002.npy"
    fs.pipe_file(shard, fs.cat_file(shard)[:-2])
    with pytest.raises(ValueError, match=r"00002.npy has 726 bytes, which are not what .* Upload"):
        open_tokens(url)
    fs.rm_file(shard)
    with pytest.raises(ValueError, match=r"torn/shard_00002.npy has no bytes, .* Upload the tok"):
        open_tokens(url)
    fs.rm_file(f"{url}/index.json")
    with pytest.raises(FileNotFoundError, match=r"s3://.*/torn is not a token file: it has no ind"):
        open_tokens(url)


@pytest.mark.parametrize(
    "call",
    [
        lambda url: write(url),
        lambda url: prepare(["text"], url),
        lambda url: cached_bins(pathlib.Path(url), [1, 2], 4),
    ],
)
def test_what_is_written_to_a_local_disk_only_refuses_a_url(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3:/+bucket/x is a URL; name a folder of this machine"):
        call("s3://bucket/x")
    assert list(tmp_path.iterdir()) == []


def test_a_size_of_the_cache_that_is_no_number_is_named(monkeypatch, url):
    monkeypatch.setenv("FORGEKIT_CACHE_GIB", "much")
    with pytest.raises(TypeError, match="FORGEKIT_CACHE_GIB is 'much', a str; pass a number"):
        windows(url)


@pytest.mark.parametrize(("fault", "workers"), [("503", 0), ("drop", 2)])
def test_an_outage_delays_the_rows_and_changes_none(folder, url, bucket, fault, workers):
    remote, expected = windows(url), batches(windows(folder))
    timer = threading.Timer(1.5, bucket.heal)
    with fk.make_loader(remote, 4, seed=1, workers=workers) as loader:
        read = [next(iter(loader)).clone()]
        bucket.fault = lambda method, path: fault
        timer.start()
        read += [batch.clone() for batch, _ in zip(loader, range(11), strict=False)]
        assert_same(read, expected)
        assert loader.wait_seconds > 1.0


def test_an_outage_that_lasts_is_named(url, bucket, monkeypatch):
    monkeypatch.setattr(block_cache, "READ_PATIENCE_S", 1.0)
    remote = windows(url)
    bucket.fault = lambda method, path: "drop"
    with pytest.raises(UrlError, match=r"shard_000\d\d.npy: the store has .* 1 s: "):
        batches(remote)


def test_a_stop_is_heard_while_data_are_out_of_reach(url, bucket):
    remote = windows(url)
    bucket.fault = lambda method, path: "503"
    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM])
    began = time.monotonic()
    with fk.StopSignal(patience_s=0.5), fk.make_loader(remote, 4, workers=1) as loader:
        timer.start()
        with pytest.raises(StoppedError, match="SIGTERM while waiting for data"):
            next(iter(loader))
    assert time.monotonic() - began < 10


def test_data_out_of_reach_end_before_the_other_ranks_lose_patience():
    others = inspect.signature(fk.Health).parameters["timeout_s"].default
    assert 60 + 10 < block_cache.READ_PATIENCE_S < others - 10


def test_a_recipe_trains_from_a_bucket_what_it_trains_from_a_disk(folder, url, tmp_path):
    rows = []
    for where in (folder, url):
        out = tmp_path / str(len(rows))
        run_here("pretrain", arguments(out=out, data__path=f"{where}/b", steps=3, save_every=0))
        rows.append([row["train/loss"] for row in rows_of(out) if "train/loss" in row])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3


def _read(rank, world, where, variables):
    os.environ.update(variables)
    return batches(windows(where), rank=rank, world=world, workers=1)


def test_ranks_that_share_a_cache_read_what_they_read_from_a_disk(folder, url, bucket, cache):
    variables = {**bucket.variables, "FORGEKIT_CACHE": str(cache)}
    for rank, read in enumerate(run_ranks(_read, 2, url, variables)):
        assert_same(read, batches(windows(folder), rank=rank, world=2))
