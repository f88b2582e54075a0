"""Sources become token files and a tokenizer, all at once, and only when something changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from forgekit.data.prepare import prepare
from forgekit.data.sources import text_documents
from forgekit.data.tokenizer import load_tokenizer, train_tokenizer
from forgekit.data.windows import token_dataset

CORPUS = Path(__file__).parent / "corpus"
TEXTS = [text for _, text in text_documents(CORPUS)]


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(CORPUS, tmp_path / "source")


def texts_of(file, tokenizer):
    bounds = zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True)
    return [tokenizer.decode(file.read(start, stop - 1).tolist()) for start, stop in bounds]


def content_of(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_every_nth_document_is_held_out_and_all_texts_come_back(source, tmp_path):
    made = prepare(source, tmp_path / "out", vocab_size=300, held_out_every=3)
    tokenizer = load_tokenizer(made.path)
    assert texts_of(made.train, tokenizer) == [TEXTS[i] for i in (0, 1, 3, 4)]
    assert texts_of(made.held_out, tokenizer) == [TEXTS[i] for i in (2, 5)]
    for file in (made.train, made.held_out):
        size = sum(len(text.encode()) for text in texts_of(file, tokenizer))
        assert file.metadata["text_bytes"] == size
        assert token_dataset(file, 8).bytes_per_token == size / file.tokens
        assert (file.vocab_size, file.eos_id) == (300, 0)
    assert made.is_new


def test_the_tokenizer_sees_the_training_documents_only(source, tmp_path):
    prepare(source, tmp_path / "out", vocab_size=300, held_out_every=3)
    alone = train_tokenizer([TEXTS[i] for i in (0, 1, 3, 4)], 300)
    assert load_tokenizer(tmp_path / "out").to_str() == alone.to_str()


def test_few_documents_are_cut_at_a_line_and_nothing_is_lost(tmp_path):
    made = prepare(CORPUS / "lighthouse.txt", tmp_path / "out", vocab_size=300, held_out_every=4)
    tokenizer = load_tokenizer(made.path)
    (train,), (held_out,) = (texts_of(file, tokenizer) for file in (made.train, made.held_out))
    assert train + held_out == (CORPUS / "lighthouse.txt").read_text()
    assert train.endswith("\n")
    assert len(held_out) >= len(train + held_out) // 4


def test_the_same_files_and_settings_are_not_prepared_twice(source, tmp_path):
    stages = []

    def again(**options):
        options = {"vocab_size": 300, "held_out_every": 3} | options
        return prepare(source, tmp_path / "out", **options, progress=lambda *to: stages.append(to))

    assert again().is_new
    before = content_of(tmp_path / "out")
    assert {stage for stage, _, _ in stages} == {"tokenizer", "training tokens", "held-out tokens"}
    assert all(0 <= done <= total for _, done, total in stages)
    stages.clear()
    assert not again().is_new
    assert not stages
    assert content_of(tmp_path / "out") == before
    assert again(vocab_size=301).is_new
    assert again(vocab_size=301, held_out_every=2).is_new
    os.utime(source / "bread.md", ns=(1, 1))
    assert again(vocab_size=301, held_out_every=2).is_new
    (tmp_path / "out" / "heldout" / "shard_00000.bin").write_bytes(b"")
    assert again(vocab_size=301, held_out_every=2).is_new


def test_preparing_anew_gives_the_same_bytes(source, tmp_path):
    for name in ("a", "b"):
        prepare([source], tmp_path / name, vocab_size=300, held_out_every=3)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")


def test_a_failure_midway_leaves_the_old_one_and_no_half_directory(source, tmp_path):
    prepare(source, tmp_path / "out", vocab_size=300)
    before = content_of(tmp_path / "out")

    def interrupt(stage, done, total):
        if stage == "held-out tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", vocab_size=301, progress=interrupt)
    assert content_of(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_foreign_files_are_not_deleted(source, tmp_path):
    prepare(source, tmp_path / "out", vocab_size=300)
    (tmp_path / "out" / "model.pt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds files that were not written here"):
        prepare(source, tmp_path / "out", vocab_size=301)
    assert (tmp_path / "out" / "model.pt").exists()


def test_bad_arguments_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="held_out_every 1 must be at least 2, to leave something"):
        prepare(source, tmp_path / "out", held_out_every=1)
    with pytest.raises(ValueError, match="vocab_size 100 must be at least 257"):
        prepare(source, tmp_path / "out", vocab_size=100)
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        prepare(tmp_path / "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()
