"""Data in a bucket: texts and token files are read as a local copy is, patiently and verified."""

from __future__ import annotations

import bz2
import gzip
import inspect
import json
import os
import pathlib
import signal
import threading
import time
from functools import partial

import numpy as np
import pyarrow
import pytest
import s3fs
from buckets import open_bucket
from pyarrow import parquet

import forgekit as fk
from forgekit.data import (
    cached_bins,
    load_tokenizer,
    open_tokens,
    prepare,
    text_documents,
)
from forgekit.remote import block_cache, urls
from forgekit.remote.urls import UrlError
from forgekit.run.stop_signal import StoppedError

SEQ_LEN, SHARD_TOKENS = 32, 300
TEXTS = [f"{'text ' * (number % 7)}{number} über\n" for number in range(60)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def write(path, seed=0):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 50, rng.integers(0, 90)) for _ in range(80)]
    return fk.write_tokens(path, documents, vocab_size=50, eos_id=0, shard_tokens=SHARD_TOKENS)


@pytest.fixture(scope="module")
def server():
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(server):
    yield server
    server.heal()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.05)
    return tmp_path / "cache" / "blocks"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of each format, in two folders; names whose order as text and as path differ."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "sub").mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "sub.jsonl.bz2").write_bytes(bz2.compress(LINES))
    table = pyarrow.table({"text": TEXTS, "other": list(range(len(TEXTS)))})
    parquet.write_table(table, folder / "sub" / "d.parquet", row_group_size=25)
    (folder / "sub" / "e.md").write_text("# Notes")
    for left_out in (".hidden.md", "f.bin"):
        (folder / left_out).write_text("left out")
    return folder


@pytest.fixture(scope="module")
def texts_url(server, texts):
    return server.upload(texts, "texts")


def test_every_format_is_read_as_from_a_local_folder_and_from_each_position(texts, texts_url):
    local, remote = text_documents(texts), text_documents(texts_url)
    assert remote.size == local.size
    records, expected = list(remote.read()), list(local.read())
    for record, reference in zip(records, expected, strict=True):
        assert (record.content, record.after) == (reference.content, reference.after)
        assert record.name.removeprefix(texts_url) == reference.name.removeprefix(str(texts))
    for at in (3, 70, 150, 239):
        rest = [record.content for record in remote.read(records[at].after)]
        assert rest == [record.content for record in records[at + 1 :]]


def test_what_is_prepared_from_a_bucket_is_what_is_prepared_from_a_disk(
    bucket, texts, texts_url, tmp_path
):
    local, remote = (
        prepare(source, tmp_path / name, vocab_size=300)
        for source, name in ((texts, "local"), (texts_url, "remote"))
    )
    assert remote.train.fingerprint == local.train.fingerprint
    assert remote.held_out.fingerprint == local.held_out.fingerprint
    prepared = bucket.upload(local.path, "prepared")
    for file in (prepared, f"{prepared}/tokenizer.json", remote.path):
        assert load_tokenizer(file).to_str() == load_tokenizer(local.path).to_str()
    assert not prepare(texts_url, tmp_path / "remote", vocab_size=300).is_new
    before, fs = text_documents(texts_url).fingerprint, s3fs.S3FileSystem()
    fs.pipe_file(f"{texts_url}/sub/e.md", b"# Other")
    assert text_documents(texts_url).fingerprint != before
    fs.pipe_file("s3://bucket/bin/a.bin", b"binary")
    for read, url, message in (
        (load_tokenizer, texts_url, "tokenizer.json does not exist"),
        (text_documents, "s3://bucket/none", "s3://bucket/none does not exist"),
        (text_documents, "s3://bucket/bin", "bucket/bin has no file to read among 1 entr"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            read(url)


def test_an_outage_while_texts_are_read_changes_none_and_a_file_that_changes_is_refused(
    bucket, tmp_path, monkeypatch
):
    (tmp_path / "a.jsonl").write_bytes(LINES * 4)
    monkeypatch.setattr("forgekit.remote.remote_files.FETCHED_BYTES", 2**12)
    url = bucket.upload(tmp_path, "outage")
    texts = iter(text_documents(url))
    read = [next(texts)[1] for _ in range(5)]
    bucket.fault = lambda method, path: "drop"
    threading.Timer(0.3, bucket.heal).start()
    assert read + [text for _, text in texts] == TEXTS * 4
    texts = iter(text_documents(url))
    next(texts)
    bucket.fs.pipe_file("bucket/outage/a.jsonl", LINES[::-1])  # past the proxy
    with pytest.raises(OSError, match=r"a\.jsonl and Etag .* no longer exists"):
        list(texts)


def test_a_file_of_records_is_opened_once_and_each_byte_is_requested_once(
    bucket, tmp_path, monkeypatch
):
    array = json.dumps([{"text": text} for text in TEXTS]).encode()
    files = {"a.jsonl": LINES, "b.json": LINES, "c.json": array, "d.jsonl": array}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr("forgekit.remote.remote_files.FETCHED_BYTES", 1536)
    url = bucket.upload(tmp_path, "once")
    for name in sorted(path.name for path in tmp_path.iterdir() if path.is_file()):
        documents = text_documents(f"{url}/{name}")
        before = bucket.requests
        assert [text for _, text in documents] == TEXTS
        blocks = -(-documents.size // 1536)
        assert blocks > ("gz" not in name)
        assert bucket.requests - before == 1 + blocks, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two token files, the second with held-out documents and a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("tokens")
    for number, name in enumerate(("a", "b", "b/heldout")):
        write(folder / name, seed=number)
    (folder / "b" / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def url(server, folder):
    return server.upload(folder, "tokens")


def windows(where, name="a", **options):
    return fk.token_dataset(f"{where}/{name}", SEQ_LEN, **options)


def held_out(where):
    file = open_tokens(f"{where}/b")
    return fk.packed_dataset(file, fk.pack(np.diff(file.offsets), SEQ_LEN)).held_out()


def batches(dataset, count=12, **options):
    with fk.make_loader(dataset, 4, seed=1, **options) as loader:
        return [batch.clone() for batch, _ in zip(loader, range(count), strict=False)]


def assert_same(batches, expected):
    assert len(batches) == len(expected) > 0
    assert all((a == b).all() for a, b in zip(batches, expected, strict=True))


MADE = {
    "windows": windows,
    "documents apart": partial(windows, name="b", doc_ids=True),
    "packed": held_out,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_rows_order_and_fingerprint_are_those_of_a_local_copy(folder, url, make):
    local, remote = make(folder), make(url)
    assert remote.fingerprint == local.fingerprint
    options = {"rank": 1, "world": 2, "start": 13, "workers": 2}
    assert_same(batches(remote, **options), batches(local, **options))


def test_a_file_of_many_blocks_reads_like_its_copy_and_each_block_is_fetched_once(bucket, tmp_path):
    long = np.random.default_rng(3).integers(1, 50, 1_300_000)
    local = fk.write_tokens(tmp_path / "c", [long], vocab_size=50, eos_id=0, shard_tokens=700_000)
    remote = open_tokens(bucket.upload(tmp_path / "c", "many"))
    before = bucket.requests
    for start, stop in 2 * [(0, 3), (262_000, 262_300), (699_990, 700_010), (1_299_000, 1_300_001)]:
        assert remote.read(start, stop).tolist() == local.read(start, stop).tolist()
    assert bucket.requests - before == 5
    assert (remote.read(0, 1_300_001) == local.read(0, 1_300_001)).all()
    again = open_tokens("s3://bucket/many", verify=True)
    assert (again.offsets.tolist(), again.fingerprint) == ([0, 1_300_001], local.fingerprint)
    assert bucket.requests - before == 6 + 3  # six blocks; the index (two), the listing, no offsets


def test_bins_come_from_a_url(folder, url, tmp_path):
    local, remote = open_tokens(folder / "b"), open_tokens(f"{url}/b")
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


def test_a_damaged_block_of_the_cache_is_fetched_again(folder, url, cache):
    batches(windows(url))
    for number, block in enumerate(cache.iterdir()):
        content = block.read_bytes()
        block.write_bytes(content[:-1] if number % 2 else bytes([content[0] ^ 1]) + content[1:])
    assert_same(batches(windows(url)), batches(windows(folder)))


def test_a_flipped_bit_a_replaced_object_and_an_incomplete_upload_are_refused(bucket, tmp_path):
    url, fs = bucket.upload(write(tmp_path / "a").path, "changing"), s3fs.S3FileSystem()
    remote, shard = open_tokens(url), f"{url}/shard_00001.npy"
    content = bytearray(fs.cat_file(shard))
    content[200] ^= 1
    fs.pipe_file(shard, bytes(content))
    for read in (partial(remote.read, SHARD_TOKENS, 301), partial(open_tokens, url, verify=True)):
        with pytest.raises(ValueError, match=r"00001.npy differs from its checksum in block 0"):
            read()
    fs.pipe_file(shard, bytes(content[:-2]))
    with pytest.raises(ValueError, match=r"00001.npy has 726 bytes, which differs"):
        open_tokens(url)
    fs.rm_file(shard)
    with pytest.raises(ValueError, match=r"00001.npy has no bytes"):
        open_tokens(url)
    fs.rm_file(f"{url}/index.json")
    with pytest.raises(FileNotFoundError, match=r"s3://.* is not a token file: it has no index"):
        open_tokens(url)
    for call in (write, lambda url: cached_bins(pathlib.Path(url), [1, 2], 4)):
        with pytest.raises(ValueError, match=r"s3:/+bucket/x is a URL; copy it, and pass a folder"):
            call("s3://bucket/x")


def test_an_outage_delays_the_rows_and_changes_none(folder, url, bucket):
    with fk.make_loader(windows(url), 4, seed=1, workers=2) as loader:
        read = [next(iter(loader)).clone()]
        bucket.fault = lambda method, path: "503"
        threading.Timer(0.4, bucket.heal).start()
        read += [batch.clone() for batch, _ in zip(loader, range(11), strict=False)]
        assert_same(read, batches(windows(folder)))
        assert loader.wait_seconds > 0.3


def test_an_outage_that_lasts_is_named_before_the_other_ranks_lose_patience(
    url, bucket, monkeypatch
):
    others = inspect.signature(fk.Health).parameters["timeout_s"].default
    assert 60 + 10 < block_cache.READ_PATIENCE_S < others - 10
    monkeypatch.setattr(block_cache, "READ_PATIENCE_S", 0.3)
    remote = windows(url)
    bucket.fault = lambda method, path: "drop"
    with pytest.raises(UrlError, match=r"shard_000\d\d.npy: the store has .* 0 s: "):
        batches(remote)


def test_a_stop_is_heard_while_data_are_out_of_reach(url, bucket):
    remote = windows(url)
    bucket.fault = lambda method, path: "503"
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM])
    began = time.monotonic()
    with fk.StopSignal(patience_s=0.2), fk.make_loader(remote, 4, workers=1) as loader:
        timer.start()
        with pytest.raises(StoppedError, match="SIGTERM while waiting for data"):
            next(iter(loader))
    assert time.monotonic() - began < 10
