"""Texts, tokenizers and logs on a disk that are missing, cut, foreign or asked for wrongly."""

from __future__ import annotations

import pytest

import forgekit as fk

pytestmark = pytest.mark.bad_input

TOKENIZERS = {
    "bytes": (b"\xff\x00", "is not a tokenizer: .*UTF-8.* Expected what the tokenizers package sa"),
    "nothing": (b"", "is not a tokenizer: EOF .* Expected what the tokenizers package saves"),
    "a list": (b"[1]", "is not a tokenizer: invalid type: sequence.* Expected what the tokenizers"),
    "half a file": (b'{"version": "1.0", ', "is not a tokenizer: EOF .* Expected what the token"),
    "a settings file": (
        b'{"vocab_size": 9}',
        "is not a tokenizer: .* Expected what the tokenizers",
    ),
}


@pytest.mark.parametrize(("content", "message"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_files_that_are_no_tokenizers_are_refused(tmp_path, content, message):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    (tmp_path / "a.txt").write_text("to be or not to be")
    with pytest.raises(ValueError, match=rf"{file} {message}"):
        fk.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=rf"{file} {message}"):
        fk.prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=file)
    assert not (tmp_path / "out").exists()


PREPARED = {
    "a held-out part of everything": (
        {"held_out_every": -2},
        ValueError,
        "^held_out_every -2 must be at least 2, to leave something",
    ),
    "shards of nothing": ({"shard_tokens": 0}, ValueError, "^shard_tokens 0 must be at least 1"),
    "no sample": ({"sample_bytes": -1}, ValueError, "^sample_bytes -1 must be at least 1"),
    "a vocabulary below the bytes": (
        {"vocab_size": -5},
        ValueError,
        r"^vocab_size -5 must be at least 257: 256 bytes and <\|endoftext\|>",
    ),
    "no such tokenizer": (
        {"tokenizer": "gone.json"},
        FileNotFoundError,
        "gone.json does not exist. `forgekit prepare` writes one beside the tokens",
    ),
    "no such closing token": (
        {"eos_token": "</s>"},
        ValueError,
        r'no token "</s>"; its special tokens are "<\|endoftext\|>"\. Name the one that closes a d',
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), PREPARED.values(), ids=PREPARED)
def test_preparations_that_cannot_be_are_refused(tmp_path, options, error, message):
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    with pytest.raises(error, match=message):
        fk.prepare(tmp_path / "a.txt", tmp_path / "out", **{"vocab_size": 300, **options})
    assert not (tmp_path / "out" / "index.json").exists()


TEXTS = {
    "half a character": ("a.txt", b"caf\xc3", r"a\.txt is not UTF-8: byte 0xc3 at .* Convert it"),
    "a picture": (
        "a.txt",
        b"\x89PNG\r\n",
        r"a\.txt is not UTF-8: byte 0x89 at position 0\. Conver",
    ),
    "an empty object": (
        "a.jsonl",
        b"{}",
        r'a\.jsonl:1 has no string "text"; it is a dict with no keys\. Each',
    ),
    "null": ("a.jsonl", b'{"text": null}', r'a\.jsonl:1 has no string "text"; .* with "text"\. E'),
    "a number": ("a.jsonl", b"3", r'a\.jsonl:1 has no string "text"; it is a int with no keys\. E'),
    "a text alone": ("a.jsonl", b'"a"', r'a\.jsonl:1 has no string "text"; it is a str with no ke'),
    "another quote": ("a.jsonl", b"{'text': 'a'}", r"a\.jsonl:1 cannot be read as JSON: .* Each"),
    "two objects in a line": (
        "a.jsonl",
        b'{"text": "a"} {"text": "b"}',
        r"a\.jsonl:1 cannot be read as JSON: Extra data at column 15\. Each",
    ),
    "no table": ("a.parquet", b"PAR1", r"a\.parquet cannot be read as parquet: .* Write it again"),
    "an empty table": ("a.parquet", b"", r"a\.parquet cannot be read as parquet: .* Write it aga"),
}


@pytest.mark.parametrize(("name", "content", "message"), TEXTS.values(), ids=TEXTS)
def test_files_that_hold_no_text_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(fk.text_documents(tmp_path))


LOGS = {
    "another encoding": b"\xff\xfe",
    "a list": b"[1]",
    "a row without a step": b'{"loss": 1}',
    "plain text": b"step 1 loss 2",
    "half a row": b'{"step": 1, "loss"',
}


@pytest.mark.parametrize("content", LOGS.values(), ids=LOGS)
def test_lines_that_are_no_rows_of_metrics_are_named(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content + b'\n{"step": 2}\n')
    message = r"metrics\.jsonl, line 1: .* is not a JSON object with a \"step\"\. Repair or delete"
    with pytest.raises(ValueError, match=message):
        fk.read_metrics(file)
    with pytest.raises(ValueError, match=message):
        fk.plot_losses(file, tmp_path / "a.png")
