"""Texts, tokenizers and logs on a disk that are missing, cut, foreign or asked for wrongly."""

from __future__ import annotations

import pytest

import forgekit as fk


def test_files_that_are_no_tokenizers_are_refused(tmp_path):
    file, text = tmp_path / "tokenizer.json", tmp_path / "a.txt"
    file.write_bytes(b'{"vocab_size": 9}')
    text.write_text("to be or not to be")
    message = rf"{file} is not a tokenizer: .* Expected what the tokenizers"
    with pytest.raises(ValueError, match=message):
        fk.data.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=message):
        fk.data.prepare(text, tmp_path / "out", tokenizer=file)
    with pytest.raises(FileNotFoundError, match=r"gone.json does not exist. `forgekit prepare` wr"):
        fk.data.prepare(text, tmp_path / "out", vocab_size=300, tokenizer="gone.json")
    assert not (tmp_path / "out").exists()


TEXTS = {
    "a.txt": (b"caf\xc3", r"a\.txt is not UTF-8: byte 0xc3 at .* Convert it"),
    "b.txt": (b"a\0b", r"b\.txt holds a NUL byte at position 1: it is binary, or text in"),
    "a.jsonl": (b'{"text": "a"} {"text": "b"}', r"a\.jsonl:1 cannot be read as JSON: Extra data"),
    "b.jsonl": (b'{"text": "a", "text": "b"}', r'b\.jsonl:1 .* the key "text" stands twice in one'),
    "a.parquet": (b"PAR1", r"a\.parquet cannot be read: .* Write it again"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_hold_no_text_are_named(tmp_path, name):
    content, message = TEXTS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(fk.data.text_documents(tmp_path))


def test_lines_that_are_no_rows_of_metrics_are_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss"\n{"step": 2}\n')
    message = r"metrics\.jsonl, line 1: .* is not a JSON object with a \"step\"\. Repair or delete"
    with pytest.raises(ValueError, match=message):
        fk.run.read_metrics(file)


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (fk.data.text_documents, fk.data.open_tokens, fk.data.load_tokenizer):
        with pytest.raises(ValueError, match=r'is empty; name a file or folder\. "\." is the curr'):
            use("")
    with pytest.raises(ValueError, match="is empty"):
        fk.data.prepare(__file__, "")
    assert not list(tmp_path.iterdir())
