"""Texts, JSON lines and parquet in a bucket: read and prepared as from a local folder."""

from __future__ import annotations

import gzip
import json
import threading

import pyarrow
import pytest
import s3fs
from buckets import open_bucket
from pyarrow import parquet

from forgekit.data import load_tokenizer, prepare, text_documents

TEXTS = [f"{'text ' * (number % 7)}{number} über\n" for number in range(200)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(scope="module")
def bucket():
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of each format, in two folders; names whose order as text and as path differ."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "sub").mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pyarrow.output_stream(str(folder / "sub.jsonl.zst"), compression="zstd") as stream:
        stream.write(LINES)
    table = pyarrow.table({"text": TEXTS, "other": list(range(len(TEXTS)))})
    parquet.write_table(table, folder / "sub" / "d.parquet", row_group_size=40)
    (folder / "sub" / "e.md").write_text("# Notes")
    (folder / ".hidden.md").write_text("hidden")
    (folder / "f.bin").write_text("binary")
    return folder


@pytest.fixture(scope="module")
def url(bucket, folder):
    return bucket.upload(folder, "texts")


def test_every_format_is_read_as_from_a_local_folder_and_from_each_position(folder, url):
    local, remote = text_documents(folder), text_documents(url)
    records, expected = list(remote.read()), list(local.read())
    assert [record.content for record in records] == [record.content for record in expected]
    names = [record.name.removeprefix(url) for record in records]
    assert names == [record.name.removeprefix(str(folder)) for record in expected]
    assert [record.after for record in records] == [record.after for record in expected]
    assert remote.size == local.size
    for at in (3, 250, 450, 799):
        rest = [record.content for record in remote.read(records[at].after)]
        assert rest == [record.content for record in records[at + 1 :]]
    one = text_documents(f"{url}/sub/d.parquet")
    assert [text for _, text in one] == TEXTS


def test_what_is_prepared_from_a_bucket_is_what_is_prepared_from_a_disk(
    bucket, folder, url, tmp_path
):
    local = prepare(folder, tmp_path / "local", vocab_size=300)
    remote = prepare(url, tmp_path / "remote", vocab_size=300)
    assert remote.train.fingerprint == local.train.fingerprint
    assert remote.held_out.fingerprint == local.held_out.fingerprint
    prepared = bucket.upload(local.path, "prepared")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist"):
        load_tokenizer(url)
    for file in (prepared, f"{prepared}/tokenizer.json", remote.path):
        assert load_tokenizer(file).to_str() == load_tokenizer(local.path).to_str()
    assert not prepare(url, tmp_path / "remote", vocab_size=300).is_new
    s3fs.S3FileSystem().pipe_file(f"{url}/sub/e.md", b"# Other")
    assert prepare(url, tmp_path / "remote", vocab_size=300).is_new


def test_an_outage_while_texts_are_read_changes_none(bucket, tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_bytes(LINES * 2)
    monkeypatch.setattr("forgekit.data.text_files.FETCHED_BYTES", 2**12)
    texts = iter(text_documents(bucket.upload(tmp_path, "outage")))
    read = [next(texts)[1] for _ in range(5)]
    bucket.fault = lambda method, path: "drop"
    threading.Timer(1.0, bucket.heal).start()
    read += [text for _, text in texts]
    assert read == TEXTS * 2


def test_a_file_that_changes_while_it_is_read_is_refused(bucket, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    url = bucket.upload(tmp_path, "changing")
    monkeypatch.setattr("forgekit.data.text_files.FETCHED_BYTES", 2**12)
    texts = iter(text_documents(url))
    next(texts)
    s3fs.S3FileSystem().pipe_file(f"{url}/a.jsonl", LINES[::-1])
    with pytest.raises(OSError, match=r"a\.jsonl and Etag .* no longer exists"):
        list(texts)


def test_urls_without_texts_are_named(bucket, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/none does not exist; name an exis"):
        text_documents("s3://bucket/none")
    (tmp_path / "a.bin").write_text("binary")
    with pytest.raises(FileNotFoundError, match=r"bucket/bin holds no file to read among 1 entr"):
        text_documents(bucket.upload(tmp_path, "bin"))
