"""Texts, tokenizers and logs on a disk that are missing, cut, foreign or asked for wrongly."""

from __future__ import annotations

import re

import pytest

import forgekit as fk

pytestmark = pytest.mark.bad_input

TOKENIZERS = {
    "bytes": (b"\xff\x00", "is not a tokenizer: .*UTF-8.* Expected what the tokenizers package sa"),
    "nothing": (b"", r"is empty\. Name what the tokenizers package saves"),
    "3,000 lists": (b"[" * 3000, "is not a tokenizer: .* Expected what the tokenizers"),
    "5,000 digits": (b"9" * 5000, "is not a tokenizer: .* Expected what the tokenizers"),
    "another kind of model": (
        b'{"version": "1.0", "model": {"type": "GPT"}}',
        "is not a tokenizer: .* Expected what the tokenizers",
    ),
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
        fk.data.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=rf"{file} {message}"):
        fk.data.prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=file)
    assert not (tmp_path / "out").exists()


PREPARED = {
    "a held-out part of everything": (
        {"held_out_every": -2},
        ValueError,
        r"^held_out_every -2 must be at least 2\.$",
    ),
    "shards of nothing": ({"shard_tokens": 0}, ValueError, "^shard_tokens 0 must be at least 1"),
    "no sample": ({"sample_bytes": -1}, ValueError, "^sample_bytes -1 must be at least 1"),
    "a vocabulary below the bytes": (
        {"vocab_size": -5},
        ValueError,
        r"^vocab_size -5 must be at least 257\.$",
    ),
    **{
        f"{name} {value!r:.12}": (
            {name: value},
            TypeError,
            rf"^{name} is {re.escape(repr(value))}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("vocab_size", "held_out_every", "sample_bytes", "shard_tokens")
        for value in (300.0, "300", True, None, [300])
    },
    **{
        f"{name} beyond int64": (
            {name: 10**30},
            ValueError,
            rf"^{name} {10**30} must be at most (2\*\*63 - 1|4,194,304)\.$",
        )
        for name in ("vocab_size", "held_out_every", "sample_bytes", "shard_tokens")
    },
    "a vocabulary that takes a terabyte": (
        {"vocab_size": 10**12},
        ValueError,
        r"^vocab_size 1000000000000 must be at most 4,194,304\.$",
    ),
    "a closing token that is a number": (
        {"eos_token": 0},
        ValueError,
        "^eos_token is 0; a tokenizer that is trained here closes documents with",
    ),
    "a list of filters": (
        {"filters": [len]},
        TypeError,
        r"^filters is \[<built-in function len>\], a list; pass functions by name: \{name: k",
    ),
    "a tokenizer that is a number": (
        {"tokenizer": 3},
        TypeError,
        r"^the tokenizer's path is 3, a int; pass a path\.$",
    ),
    "a tokenizer with a NUL": (
        {"tokenizer": "a\0"},
        ValueError,
        "^the tokenizer's path 'a.x00' holds a NUL character, which no path can; remove it",
    ),
    "no such tokenizer": (
        {"tokenizer": "gone.json"},
        FileNotFoundError,
        "gone.json does not exist. `forgekit prepare` writes one beside the tokens",
    ),
    "no such closing token": (
        {"eos_token": "</s>"},
        ValueError,
        r"^eos_token is '</s>'; a tokenizer that is trained here closes documents with .* alone\.",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), PREPARED.values(), ids=PREPARED)
def test_preparations_that_cannot_be_are_refused(tmp_path, options, error, message):
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    with pytest.raises(error, match=message):
        fk.data.prepare(tmp_path / "a.txt", tmp_path / "out", **{"vocab_size": 300, **options})
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
        r'a\.jsonl:1 has no string "text"; it is {}\. Each',
    ),
    "null": (
        "a.jsonl",
        b'{"text": null}',
        r'a\.jsonl:1 has no string "text"; it is {.text.: None}',
    ),
    "a number": ("a.jsonl", b"3", r'a\.jsonl:1 has no string "text"; it is 3\. Each'),
    "a text alone": ("a.jsonl", b'"a"', r'a\.jsonl:1 has no string "text"; it is .a.\. Each'),
    "another quote": ("a.jsonl", b"{'text': 'a'}", r"a\.jsonl:1 cannot be read as JSON: .* Each"),
    "two objects in a line": (
        "a.jsonl",
        b'{"text": "a"} {"text": "b"}',
        r"a\.jsonl:1 cannot be read as JSON: Extra data at column 15\. Each",
    ),
    "a NUL": ("a.txt", b"a\0b", r"a\.txt holds a NUL byte at position 1: it is binary, or text in"),
    "UTF-16 without a mark": (
        "a.txt",
        "to be".encode("utf-16-le"),
        r"a\.txt holds a NUL byte at position 1: .* Convert it \(iconv -t UTF-8\) or leave it out",
    ),
    "UTF-16": ("a.md", "to".encode("utf-16"), r"a\.md holds a NUL byte at .* text in UTF-16"),
    "Latin-1": ("a.py", b"# caf\xe9", r"a\.py is not UTF-8: byte 0xe9 at position 5\. Convert it"),
    "half of a pair": (
        "a.jsonl",
        b'{"text": "\\ud800"}',
        r"a\.jsonl:1 cannot be read as JSON: .*surrogates not allowed\. Each",
    ),
    "a key that stands twice": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "a", "text": "b"}',
        r'a\.jsonl:2 cannot be read as JSON: the key "text" stands twice in one object\. Each',
    ),
    "5,000 digits": (
        "a.jsonl",
        b'{"text": "a"}\n\n{"text": "a", "id": ' + b"9" * 5000 + b"}",
        r"a\.jsonl:3 cannot be read as JSON: an integer has more than 4,300 digits\. Each",
    ),
    "5,000 digits below zero": (
        "a.jsonl",
        b'{"id": -' + b"9" * 5000 + b', "text": "a"}',
        r"a\.jsonl:1 cannot be read as JSON: an integer has more than 4,300 digits\. Each",
    ),
    **{
        f"3,000 {name}": (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "a", "more": ' + content,
            r"a\.jsonl:2 cannot be read as JSON: brackets are nested too deeply\. Each",
        )
        for name, content in (
            ("lists", b"[" * 3000),
            ("closed lists", b"[" * 3000 + b"]" * 3000 + b"}"),
            ("objects", b'{"a":' * 3000),
        )
    },
    "a key of escapes": (
        "a.jsonl",
        b'{"\\u001b[2J": "a"}',
        r'a\.jsonl:1 has no string "text"; it is {..x1b\[2J.: .a.}\. Each',
    ),
    "a hundred keys": (
        "a.jsonl",
        b'{"a0": 1' + b"".join(b', "a%d": 1' % i for i in range(1, 100)) + b"}",
        r'a\.jsonl:1 has no string "text"; it is {.a0.: 1, .*\.\.\.\. Each',
    ),
    "a text in a list": (
        "a.jsonl",
        b'{"text": ["a"]}',
        r'a\.jsonl:1 has no string "text"; it is {.text.: \[.a.\]}',
    ),
    "a mark in the middle": (
        "a.jsonl",
        b'{"text": "a"}\n\xef\xbb\xbf\xef\xbb\xbf{"text": "a"}',
        r"a\.jsonl:2 cannot be read as JSON: Expecting value at column 1\. Each",
    ),
    "no table": ("a.parquet", b"PAR1", r"a\.parquet cannot be read as parquet: .* Write it again"),
    "an empty table": ("a.parquet", b"", r"a\.parquet cannot be read as parquet: .* Write it aga"),
}


@pytest.mark.parametrize(("name", "content", "message"), TEXTS.values(), ids=TEXTS)
def test_files_that_hold_no_text_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(fk.data.text_documents(tmp_path))


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
        fk.run.read_metrics(file)
    with pytest.raises(ValueError, match=message):
        fk.run.plot_losses(file, tmp_path / "a.png")


PATHS = {
    "text_documents": (fk.data.text_documents, "a path"),
    "open_tokens": (fk.data.open_tokens, "the token file"),
    "token_documents": (fk.data.token_documents, "the token file"),
    "token_dataset": (fk.token_dataset, "the token file"),
    "load_tokenizer": (fk.data.load_tokenizer, "the tokenizer's path"),
    "huggingface_documents": (fk.data.huggingface_documents, "the dataset's name"),
    "write_tokens": (lambda path: fk.write_tokens(path, [[1]], vocab_size=2, eos_id=0), "the path"),
    "prepare": (lambda path: fk.data.prepare(__file__, path), "out"),
    "cached_bins": (lambda path: fk.data.cached_bins(path, [3], 4), "folder"),
}
NO_PATHS = {
    "empty": ("", r'is empty; name a file or folder\. "\." is the current folder\.$'),
    "with a NUL": ("a\0b", r"'a\\x00b' holds a NUL character, which no path can; remove it\.$"),
    "with too long a name": (
        f"a/{'x' * 256}",
        r"'a/x+\.\.\. has a name of 256 bytes; a file system takes 255\. Choose a shorter one\.$",
    ),
    "too long": ("x/" * 2049, r"'x/x.* is a path of 4,09. characters; a system takes 4,095\. Choo"),
}


@pytest.mark.parametrize(("path", "message"), NO_PATHS.values(), ids=NO_PATHS)
@pytest.mark.parametrize(("use", "name"), PATHS.values(), ids=PATHS)
def test_what_no_file_system_holds_is_no_path(use, name, path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{name} {message}"):
        use(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [3, None, 2.5, b"a"], ids=repr)
@pytest.mark.parametrize("name", ["open_tokens", "load_tokenizer", "prepare", "write_tokens"])
def test_what_is_no_text_is_no_path(name, path):
    use, what = PATHS[name]
    with pytest.raises(TypeError, match=rf"^{what} is {path!r}, a {type(path).__name__}; pass a p"):
        use(path)
