"""Texts, tokenizers and logs on a disk that are missing, cut, foreign or asked for wrongly."""

from __future__ import annotations

import pytest

import forgekit as fk

TOKENIZERS = {
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
    "no such tokenizer": (
        {"tokenizer": "gone.json"},
        FileNotFoundError,
        "gone.json does not exist. `forgekit prepare` writes one beside the tokens",
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
    "two objects in a line": (
        "a.jsonl",
        b'{"text": "a"} {"text": "b"}',
        r"a\.jsonl:1 cannot be read as JSON: Extra data at column 15\. Each",
    ),
    "a NUL": ("a.txt", b"a\0b", r"a\.txt holds a NUL byte at position 1: it is binary, or text in"),
    "a key that stands twice": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "a", "text": "b"}',
        r'a\.jsonl:2 cannot be read as JSON: the key "text" stands twice in one object\. Each',
    ),
    "no table": ("a.parquet", b"PAR1", r"a\.parquet cannot be read: .* Write it again"),
}


@pytest.mark.parametrize(("name", "content", "message"), TEXTS.values(), ids=TEXTS)
def test_files_that_hold_no_text_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(fk.data.text_documents(tmp_path))


LOGS = {
    "half a row": b'{"step": 1, "loss"',
}


@pytest.mark.parametrize("content", LOGS.values(), ids=LOGS)
def test_lines_that_are_no_rows_of_metrics_are_named(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content + b'\n{"step": 2}\n')
    message = r"metrics\.jsonl, line 1: .* is not a JSON object with a \"step\"\. Repair or delete"
    with pytest.raises(ValueError, match=message):
        fk.run.read_metrics(file)


@pytest.mark.parametrize(
    "use",
    [
        fk.data.text_documents,
        fk.data.open_tokens,
        fk.data.load_tokenizer,
        lambda path: fk.data.prepare(__file__, path),
    ],
)
def test_an_empty_path_is_not_the_current_folder(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'is empty; name a file or folder\. "\." is the current'):
        use("")
    assert not list(tmp_path.iterdir())
