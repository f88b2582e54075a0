"""Documents from files, folders and JSON lines; what is wrong is named by file and line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import CORPUS

from forgekit.data.text_files import json_objects, stdlib_documents, text_documents


def test_a_folder_gives_its_documents_sorted_and_each_line_of_jsonl_is_one():
    once = list(text_documents(CORPUS))
    names = [Path(name).name for name, _ in once]
    lines = [f"notes.jsonl:{number}" for number in (1, 2, 4)]
    assert names == ["bread.md", "ledger.py", "lighthouse.txt", *lines]
    # A file that is found twice counts once.
    assert list(text_documents([CORPUS, CORPUS / "bread.md", f"{CORPUS}/../corpus"])) == once


@pytest.mark.timeout(20)
def test_a_folder_leaves_out_what_is_no_text_but_a_named_file_is_read(tmp_path):
    """Hidden, foreign and blank files, and pipes, which are not waited for."""
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / "a.txt")
    for name in (".git/config.txt", "picture.png", "blank.txt", "odd.name", "deep.txt"):
        (tmp_path / name).write_text(" \n" if name == "blank.txt" else name)
    texts = [text for _, text in text_documents([tmp_path, tmp_path / "odd.name"])]
    assert texts == ["deep.txt", "odd.name"]
    for name, message in (("a.txt", "has no file to read among 0"), ("b.txt", "does not exist")):
        with pytest.raises(FileNotFoundError, match=f"{name} {message}"):
            text_documents(tmp_path / name)


def test_the_standard_library_comes_without_tests_and_packages():
    files = stdlib_documents().files
    assert 400 < len(files) < 900
    assert "argparse.py" in {file.name for file in files}
    assert not any({"site-packages", "test"} & {*file.parts} for file in files)


BROKEN = {  # lines of JSON
    b'{"body": "a", "id": 1}': r"a.jsonl:2 has no string .text.; it is {'body': 'a', 'id': 1}",
    b'{"text": "\xff"}': "a.jsonl:3 is not UTF-8: byte 0xff at position 10",
    b'{"text": "\\ud83d"}': "a.jsonl:4 cannot be read as JSON: '?utf-8",
    b"[" * 100_000: "a.jsonl:5 cannot be read as JSON: it is nested too deeply",
    b'{"text": "a': "a.jsonl:6 .* Unterminated string starting at column 10",
}


def test_what_is_broken_is_named_and_left_out_or_fatal(tmp_path):
    good = b'{"text": "a"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, *BROKEN, good]))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "d.txt").write_text("c")
    documents = text_documents(tmp_path, errors="skip")
    assert [text for _, text in documents] == ["a", "a", "c"]
    problems = [record.problem for record in documents.read() if record.problem]
    named = *BROKEN.values(), "b.txt is not UTF-8", "c.parquet cannot be read: .* Write it again"
    for problem, message in zip(problems, named, strict=True):
        assert re.search(message, problem)
    with pytest.raises(ValueError, match=named[0]):
        list(text_documents(tmp_path))
    with pytest.raises(ValueError, match="errors is 'ignore'"):
        text_documents(tmp_path, errors="ignore")  # pyright: ignore[reportArgumentType]


def write_parquet(file, texts, key="text", **options):
    pa.parquet.write_table(pa.table({"id": range(len(texts)), key: texts}), file, **options)


@pytest.mark.parametrize(
    ("row_group_size", "kind"),
    [(1, pa.string()), (300, pa.large_string()), (1000, pa.dictionary(pa.int32(), pa.string()))],
)
def test_parquet_gives_a_document_per_row_whatever_its_groups(tmp_path, row_group_size, kind):
    texts = [f"text {number}" for number in range(700)]
    write_parquet(tmp_path / "a.parquet", pa.array(texts).cast(kind), row_group_size=row_group_size)
    documents = text_documents(tmp_path)
    records = list(documents.read())
    assert [record.content for record in records] == texts
    assert records[299].name == f"{tmp_path}/a.parquet[299]"
    assert list(documents.read(records[555].after)) == records[556:]


def test_parquet_that_holds_no_text_is_refused_by_file_and_row(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, ["a", None])
    for options, message in (
        ({}, r'a.parquet\[1\] has NoneType in column "text", not a st'),
        ({"text_key": "body", "errors": "skip"}, r'has no column "body"; it has "id", "text"'),
    ):
        with pytest.raises(ValueError, match=message):
            list(text_documents(file, **options))
    texts = [str(number) * 100 for number in range(50)]
    write_parquet(file, texts, write_page_checksum=True, compression="none")
    content = bytearray(file.read_bytes())
    content[-1500:-1400] = bytes(100)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.parquet cannot be read: .* Write it again"):
        list(text_documents(file))


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("name", [f"a.{kind}{end}" for kind in ("txt", "jsonl") for end in PACKERS])
def test_a_damaged_archive_is_named_and_skipped_as_a_whole(tmp_path, name):
    line = b'{"text": "a text of some length"}\n'
    content = bytes(range(33, 127)) * 900 if "txt" in name else line * 9000
    whole = PACKERS[name[name.rindex(".") :]](content)
    (tmp_path / "b.txt").write_text("whole")
    for content in (whole[: len(whole) // 2], b"no archive" + whole):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} cannot be read: .*\. Write it again"):
            list(text_documents(tmp_path))
        documents = text_documents(tmp_path, errors="skip")
        *_, damaged, last = documents.read()
        assert damaged.problem is not None
        assert (last.content, list(documents.read(damaged.after))) == ("whole", [last])


LINES = st.one_of(
    st.text("ab ü\n", max_size=4).map(lambda text: json.dumps({"text": text})),
    st.sampled_from(["", "  ", "{", "[]", '{"text": 1}']),
)


@given(st.lists(LINES, max_size=12), st.lists(st.text("a b\n", max_size=3), max_size=6), st.data())
@settings(max_examples=25, deadline=None)
def test_readers_share_documents_and_each_goes_on_from_any_of_its_own(
    tmp_path_factory, lines, texts, data
):
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("".join(texts))
    write_parquet(folder / "c.parquet", pa.array([*texts, None], pa.string()), row_group_size=2)
    (folder / "d.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    documents = text_documents(folder, errors="skip")
    parts, found = data.draw(st.integers(1, 4)), []
    for part in range(parts):
        records = list(documents.read(part=part, parts=parts))
        found += records
        for number, record in enumerate(records):
            following = documents.read(record.after, part=part, parts=parts)
            assert list(following) == records[number + 1 :]
    assert sorted(map(str, found)) == sorted(map(str, documents.read()))


RECORDS = [
    {"id": n, "text": t} for n, t in enumerate(["once", 'a "b",\n[{c}]', "ü\t \u2028", "end"])
]
LINED = "\n".join(json.dumps(record) for record in RECORDS)
FILES = {
    **{f"a{suffix}": LINED for suffix in (".json", ".NDJSON", ".jsonlines", ".jsonl")},
    "b.json": json.dumps(RECORDS, indent=1, ensure_ascii=False),
    "b.jsonl": "[" + LINED.replace("\n", ",\n") + "]",
    "c.json": "\ufeff\n" + json.dumps(RECORDS),
}


@pytest.mark.parametrize("name", FILES)
def test_records_are_read_by_what_is_in_the_file(tmp_path, name):
    plain = tmp_path / name
    plain.write_text(FILES[name], newline="")
    for suffix, compress in PACKERS.items():
        (tmp_path / (name + suffix)).write_bytes(compress(plain.read_bytes()))
    for file in sorted(tmp_path.iterdir()):
        documents = text_documents(file)
        for part, parts in ((0, 1), (1, 3)):
            records = list(documents.read(part=part, parts=parts))
            assert [r.content for r in records] == [r["text"] for r in RECORDS[part::parts]]
            for number, record in enumerate(records):
                following = documents.read(record.after, part=part, parts=parts)
                assert list(following) == records[number + 1 :]
        assert [record for _, record in json_objects(file)] == RECORDS


LONG = "x" * 300_000
SAID = {  # the bytes of a file, and its texts or what is said of it
    ("a.txt", "\ufeff\ta\r\nü\u2028b\rc".encode()): ["\ta\r\nü\u2028b\rc"],
    ("a.txt", "text".encode("utf-16")): "a.txt is not UTF-8|a.txt contains a NUL",
    ("a.txt", b"a\x00b"): "a.txt contains a NUL byte at position 1",
    ("a.txt", b"a\xff"): "a.txt is not UTF-8: byte 0xff at position 1",
    ("a.txt", b" \r\n\t"): [],
    ("a.txt", b'{"text": "a"}\n{"text": "b"}\n'): r"a.txt begins with a JSON record that has .text",
    ("a.js", b'{\n "text": "a"\n}'): "a.js begins with a JSON record",
    **{(name, b'{"a": 1}\n'): ['{"a": 1}\n'] for name in ("part-0", "a.json")},
    ("a.json", b'{\n "a": ["b"]\n}'): ['{\n "a": ["b"]\n}'],
    ("a.json", b'{"text": "a"}'): ["a"],
    ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": " "}\n{"text": "b"}'): ["a", "b"],
    ("a.jsonl", b'\xef\xbb\xbf\n{"text": "a"}'): ["a"],
    ("a.jsonl", b"\xef\xbb\xbf"): [],
    ("a.jsonl", b'[{"text": "a"}]\n[{"text": "b"}]'): "a.jsonl cannot be read: Expecting ']' at",
    ("a.jsonl", b'{"text": "a"}\n\0\0'): "a.jsonl:2 cannot be read as JSON",
    ("a.jsonl.gz", gzip.compress(b'{"te', mtime=0) + gzip.compress(b'xt": "a"}', mtime=0)): ["a"],
    ("a.jsonl", b'{"text": "a"},\n'): "a.jsonl:1 cannot be read as JSON: Extra data at column 14",
    ("a.jsonl", b'{"text": "a"}{"text": "b"}'): "a.jsonl:1 cannot be read as JSON: Extra data",
    ("a.jsonl", b'{"text": "a"}\n[{"text": "b"}]'): "a.jsonl:2 has no string .text.",
    ("a.jsonl", '{"text": "a\\u0000b\u2028c\x85"}'.encode()): ["a\x00b\u2028c\x85"],
    ("a.jsonl", f'{{"text": "{LONG}"}}'.encode()): [LONG],
    ("a.jsonl", b'{"text": null}'): "a.jsonl:1 has no string .text.",
    ("a.jsonl", b'{"text": ["a"]}'): "a.jsonl:1 has no string .text.",
    ("a.jsonl", b'{"text": "a", "text": "b"}'): "a.jsonl:1 cannot .* the key .text. appears twice",
    ("a.json", b'[{"text": "a"}, 3]'): r"a.json\[1\] has no string .text.; it is 3",
    ("a.json", b'[{"text": "a"} {"text": "b"}]'): "a.json cannot be read: Expecting ',' or ']'",
    ("a.json", b'[{"text": "a"}, '): "a.json cannot be read: Expecting",
    ("a.json", b'[{"text": "a"}]]'): "a.json cannot be read: Expecting",
    ("a.json", b'["a", "b"]'): r"a.json\[0\] has no string .text.; it is .a.",
    ("a.txt.gz", gzip.compress(b"once ", mtime=0) + gzip.compress(b"upon", mtime=0)): ["once upon"],
    **{(name, b"a"): f"{name} is not read; write" for name in ("a.csv", "a.TSV.gz", "a.txt.zst")},
}


@pytest.mark.parametrize(("name", "content"), SAID)
def test_what_a_file_says_becomes_its_texts_or_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    said = SAID[name, content]
    if isinstance(said, list):
        assert [text for _, text in text_documents(tmp_path / name)] == said
    else:
        with pytest.raises(ValueError, match=said):
            list(text_documents(tmp_path / name))
