"""Documents from files, folders and JSON lines; what is wrong is named by file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forgekit.data.sources import stdlib_documents, text_documents

CORPUS = Path(__file__).parent / "corpus"


def test_a_folder_gives_its_documents_sorted_and_each_line_of_jsonl_is_one():
    names = [Path(name).name for name, _ in text_documents(CORPUS)]
    assert names == [
        "bread.md",
        "ledger.py",
        "lighthouse.txt",
        "notes.jsonl:1",
        "notes.jsonl:2",
        "notes.jsonl:4",
    ]


def test_texts_arrive_unchanged(tmp_path):
    text = "tabs\tand\r\nline ends, ümlauts and \u2028 separators\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert dict(text_documents(tmp_path / "a.txt")) == {str(tmp_path / "a.txt"): text}


def test_a_file_found_twice_counts_once():
    once = list(text_documents(CORPUS))
    assert list(text_documents([CORPUS, CORPUS / "bread.md", f"{CORPUS}/../corpus"])) == once


def test_a_folder_leaves_out_hidden_foreign_and_blank_files_but_a_named_file_is_read(tmp_path):
    (tmp_path / ".git").mkdir()
    for name in (".git/config.txt", "picture.png", "blank.txt", "odd.name", "deep.txt"):
        (tmp_path / name).write_text(" \n" if name == "blank.txt" else name)
    found = [text for _, text in text_documents([tmp_path, tmp_path / "odd.name"])]
    assert found == ["deep.txt", "odd.name"]


def test_the_standard_library_comes_without_tests_and_packages():
    documents = dict(stdlib_documents())
    assert 400 < len(documents) < 900
    assert any(name.endswith("argparse.py") for name in documents)
    assert not any("site-packages" in name or "/test/" in name for name in documents)


BAD = {
    "missing": (None, FileNotFoundError, r"a.txt does not exist; name an existing file or folder"),
    "blank": (b" \n", ValueError, r"1 files hold no text \(first: .*a.txt\)"),
    "latin": (b"caf\xe9", ValueError, r"a.txt is not UTF-8: byte 0xe9 at position 3. Convert it"),
}
BAD_LINES = {
    "broken": (
        '{"text": "a"}\n{"text": ',
        r"a.jsonl:2 cannot be read as JSON: .* column 10 ",
    ),
    "no text": ('{"body": "a", "id": 1}', r'a.jsonl:1 has no string "text"; .* "body", "id". Each'),
    "number": ('{"text": 1}', r'a.jsonl:1 has no string "text"; it is a dict with "text"'),
    "list": ("[1]", r'a.jsonl:1 has no string "text"; it is a list with no keys'),
}


@pytest.mark.parametrize(("content", "error", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_refused(tmp_path, content, error, message):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(error, match=message):
        list(text_documents(tmp_path / "a.txt"))


@pytest.mark.parametrize(("content", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines_are_named_by_file_and_number(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(text_documents(tmp_path))


def test_a_bad_byte_in_jsonl_is_named_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2 is not UTF-8: byte 0xff at position 10"):
        list(text_documents(tmp_path))


def test_what_does_not_exist_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        text_documents([CORPUS, tmp_path / "gone"])


def test_a_folder_without_texts_and_an_empty_list_are_refused(tmp_path):
    (tmp_path / "a.png").write_text("")
    with pytest.raises(FileNotFoundError, match=re.escape("holds no file to read among 1 entries")):
        text_documents(tmp_path)
    with pytest.raises(ValueError, match="no paths were given; name at least one"):
        text_documents([])


def test_jsonl_is_known_by_its_ending_whatever_the_case(tmp_path):
    (tmp_path / "A.JSONL").write_text('{"text": "a"}')
    assert [text for _, text in text_documents([tmp_path])] == ["a"]


@pytest.mark.parametrize("content", ['{"text": "\\ud83d"}', "[" * 100_000])
def test_json_that_is_no_text_is_named_by_file_and_number(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"a.jsonl:1 cannot be read as JSON"):
        list(text_documents([tmp_path]))
