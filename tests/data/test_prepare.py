"""Sources become token files and a tokenizer, all at once, and only when something changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from runs import launch

from forgekit.data import prepare_corpus
from forgekit.data import tokenizer as encoding
from forgekit.data.prepare_corpus import prepare
from forgekit.data.rows import token_dataset
from forgekit.data.text_files import text_documents
from forgekit.data.token_files import open_tokens
from forgekit.data.tokenizer import encode_texts, load_tokenizer, train_tokenizer

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
    assert {stage for stage, _, _ in stages} == {"tokenizer", "tokens"}
    assert all(0 <= done <= total for _, done, total in stages)
    stages.clear()
    assert not again().is_new
    assert not stages
    assert content_of(tmp_path / "out") == before
    assert again(vocab_size=301).is_new
    assert again(vocab_size=301, held_out_every=2).is_new
    os.utime(source / "bread.md", ns=(1, 1))
    assert again(vocab_size=301, held_out_every=2).is_new
    (tmp_path / "out" / "heldout" / "shard_00000.npy").write_bytes(b"")
    assert again(vocab_size=301, held_out_every=2).is_new


def test_preparing_anew_gives_the_same_bytes(source, tmp_path):
    for name in ("a", "b"):
        prepare([source], tmp_path / name, vocab_size=300, held_out_every=3)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")


@pytest.fixture
def small_steps(monkeypatch):
    """Many batches, parts and reports of progress on little text."""
    monkeypatch.setattr(encoding, "AT_ONCE", 2000)
    monkeypatch.setattr(encoding, "PIECE", 500)
    monkeypatch.setattr(prepare_corpus, "PART_BYTES", 2000)
    monkeypatch.setattr(prepare_corpus, "REPORT_BYTES", 500)


def write_lines(file, count=400, broken=97):
    chance = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "far", "hill"]
    texts = [" ".join(chance.choices(words, k=chance.choice([2, 9, 40, 90]))) for _ in range(count)]
    lines = [json.dumps({"text": f"{text} {number}"}) for number, text in enumerate(texts)]
    lines[broken::broken] = ["{broken"] * len(lines[broken::broken])
    file.write_text("\n".join(lines))
    return [f"{text} {n}" for n, text in enumerate(texts) if n < broken or n % broken]


def interrupted(source, out, after, **options):
    """Prepare until a report of progress beyond so many bytes of the second stage."""

    def interrupt(stage, done, total):
        if stage == "tokens" and done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, vocab_size=300, progress=interrupt, **options)


def left_by(out):
    return sorted(path for path in out.parent.glob(f".{out.name}.*"))


def test_a_failure_midway_leaves_the_old_one_and_is_taken_up(tmp_path, small_steps):
    write_lines(tmp_path / "a.jsonl", broken=10**6)
    prepare(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=299)
    before = content_of(tmp_path / "out")
    interrupted(tmp_path / "a.jsonl", tmp_path / "out", 30_000)
    assert content_of(tmp_path / "out") == before
    (left,) = left_by(tmp_path / "out")
    stages = []
    prepare(
        tmp_path / "a.jsonl",
        tmp_path / "out",
        vocab_size=300,
        progress=lambda stage, done, _: stages.append((stage, done)),
    )
    assert stages[0][0] == "tokens"
    assert 20_000 < stages[0][1] <= 33_000
    assert not left.exists()
    prepare(tmp_path / "a.jsonl", tmp_path / "fresh", vocab_size=300)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "fresh", "out"]


def test_parts_may_be_finished_out_of_turn_and_none_hides_a_fatal_line(tmp_path, small_steps):
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(file)
    skipping = text_documents(file, errors="skip")
    interrupted(skipping, out, 30_000)
    with pytest.raises(ValueError, match=r"a.jsonl:98 cannot be read"):
        prepare(file, out, vocab_size=300)
    (left,) = left_by(out)
    (left / "parts" / "000002.npz").unlink()
    assert prepare(skipping, out, vocab_size=300).broken == 4
    prepare(skipping, tmp_path / "fresh", vocab_size=300)
    assert content_of(out) == content_of(tmp_path / "fresh")


def test_other_settings_clear_what_was_begun_and_a_mistake_does_not(tmp_path, small_steps):
    write_lines(tmp_path / "a.jsonl", broken=10**6)
    interrupted(tmp_path / "a.jsonl", tmp_path / "out", 0)
    (begun,) = left_by(tmp_path / "out")
    with pytest.raises(ValueError, match="vocab_size 100"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=100)
    assert left_by(tmp_path / "out") == [begun]
    prepare(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=301)
    assert not left_by(tmp_path / "out")


def test_a_tokenizer_that_truncates_or_pads_does_so_in_no_token_file(source, tmp_path):
    own = train_tokenizer(TEXTS, 300)
    own.save(str(tmp_path / "plain.json"))
    own.enable_truncation(max_length=5)
    own.enable_padding(length=400, pad_id=7)
    own.save(str(tmp_path / "limited.json"))
    made = {
        name: prepare(source, tmp_path / name, tokenizer=tmp_path / f"{name}.json")
        for name in ("plain", "limited")
    }
    assert made["limited"].train.fingerprint == made["plain"].train.fingerprint
    assert made["limited"].held_out.fingerprint == made["plain"].held_out.fingerprint
    kept = load_tokenizer(tmp_path / "limited")
    assert (kept.truncation, kept.padding) == (None, None)
    assert texts_of(made["limited"].train, kept) == texts_of(made["plain"].train, kept)


def test_a_vocabulary_that_the_text_does_not_fill_is_said_each_time_and_recorded(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    sentence = (
        "the tokenizer has 266 tokens instead of 8,192: the 903 bytes of training text hold no "
        "more pairs of tokens to join. Prepare more text, or ask for a vocabulary of 266"
    )
    for times in (1, 2):
        made = prepare(tmp_path / "a.txt", tmp_path / "out", vocab_size=8192)
        assert [record.message for record in caplog.records] == [sentence] * times
    assert made.train.metadata["vocab_size_asked"] == 8192
    caplog.clear()
    prepare(tmp_path / "a.txt", tmp_path / "out", vocab_size=266)
    prepare(tmp_path / "a.txt", tmp_path / "b", tokenizer=tmp_path / "out", vocab_size=8192)
    assert caplog.records == []


def test_special_tokens_control_characters_and_line_ends_in_a_text_stay_text(tmp_path):
    text = "one<|endoftext|>two\r\nthree\u0000\ufefffour<|end|>"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "b"}))
    own = train_tokenizer(TEXTS, 290)
    own.add_special_tokens(["<|end|>"])
    own.save(str(tmp_path / "own.json"))
    for given in ({}, {"tokenizer": tmp_path / "own.json"}):
        made = prepare(tmp_path / "a.jsonl", tmp_path / "out", held_out_every=2, **given)
        ids = made.train.read(0, made.train.tokens).tolist()
        assert (ids[-1], ids.count(0), ids.count(290)) == (0, 1, 0)
        assert load_tokenizer(tmp_path / "out").decode(ids[:-1]) == text


def test_the_target_may_lie_inside_of_a_source_folder(source, tmp_path):
    made = prepare(source, source / "tokens", vocab_size=300)
    again = prepare(source, source / "tokens", vocab_size=300)
    assert (made.is_new, again.is_new) == (True, False)


def test_ids_may_have_gaps(source, tmp_path):
    content = json.loads(train_tokenizer(TEXTS, 300).to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 900
    (tmp_path / "own.json").write_text(json.dumps(content))
    made = prepare(source, tmp_path / "out", tokenizer=tmp_path / "own.json")
    assert made.train.vocab_size == 901
    assert made.train.read(0, made.train.tokens).max() == 900


def test_processes_write_what_one_writes_whatever_the_parts(tmp_path, small_steps, monkeypatch):
    texts = write_lines(tmp_path / "a.jsonl", count=200, broken=10**6)
    documents = text_documents(tmp_path / "a.jsonl", errors="skip")
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "\n{broken")
    contents, files = {}, {}
    for name, workers in {"alone": 0, "processes": 2, "one part": 0}.items():
        if name == "one part":
            monkeypatch.setattr(prepare_corpus, "PART_BYTES", 10**6)
        made = prepare(documents, tmp_path / name, vocab_size=300, workers=workers)
        contents[name] = content_of(made.path)
        files[name] = made.train.fingerprint, made.held_out.fingerprint, made.broken
        assert made.broken == 1
        assert made.train.documents + made.held_out.documents == len(texts)
    assert contents["alone"] == contents["processes"]
    assert files["alone"] == files["one part"]


DRIVER = Path(__file__).parent / "kill_prepare.py"


@pytest.mark.parametrize("seeds", [(2,), pytest.param((1, 2, 3), marks=pytest.mark.oracle)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path, seeds):
    source = tmp_path / "source"
    source.mkdir()
    write_lines(source / "a.jsonl", count=500)
    shutil.copy(CORPUS / "lighthouse.txt", source / "b.txt")
    words = ["kill", source, tmp_path / "out", *seeds]
    with launch(DRIVER, list(map(str, words)), log=tmp_path / "log") as job:
        assert job.process.wait() == 0, job.output
    found = [json.loads(line) for line in job.output.splitlines() if line[0] == "{"]
    expected = content_of(tmp_path / "out-undisturbed")
    assert len(expected) > 8
    for seed in seeds:
        assert content_of(tmp_path / f"out-{seed}") == expected
    assert sum(each["kills"] for each in found) >= 2 * len(seeds)
    assert any(parts > 0 for each in found for parts in each["parts"])
    assert not list(tmp_path.glob(".out*"))
    open_tokens(tmp_path / f"out-{seeds[0]}", verify=True)


LONGER = "the cat sat on a mat and the dog ran to the far hill"


@pytest.mark.parametrize(
    ("documents", "text"),
    [(3_000, LONGER * 7), pytest.param(20_000, LONGER, marks=pytest.mark.oracle)],
    ids=["longer documents", "more documents"],
)
def test_memory_does_not_depend_on_the_amount_of_text(tmp_path, documents, text):
    lines = "".join(json.dumps({"text": f"{text} {number}"}) + "\n" for number in range(documents))
    (tmp_path / "small.jsonl").write_text(lines)
    (tmp_path / "large.jsonl").write_text(lines * 5)
    sources = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    command = [sys.executable, DRIVER, "measure", *sources]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"}  # fewer pools, so less waste that varies
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)
    assert large - small < 3, "MB, of 5 MB more text"


def test_long_documents_are_encoded_in_pieces_and_give_the_same_ids(monkeypatch):
    text = "\n".join(TEXTS) + "\n\n  two  spaces\t\r\n" + "x" * 700 + " " + "".join(TEXTS)
    tokenizer = train_tokenizer(TEXTS, 400)
    expected = tokenizer.encode(text).ids
    for piece, at_once in ((400, 1000), (1000, 300), (10**6, 10**6)):
        monkeypatch.setattr(encoding, "PIECE", piece)
        monkeypatch.setattr(encoding, "AT_ONCE", at_once)
        found = dict(encode_texts(tokenizer, [("a", text), ("b", ""), ("c", TEXTS[0])]))
        assert found["a"].tolist() == expected
        assert found["b"].tolist() == []
        assert found["c"].tolist() == tokenizer.encode(TEXTS[0]).ids


def metaspace(tokenizers):
    return tokenizers.pre_tokenizers.Metaspace()


def unsplit(tokenizers):
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def prefixed(tokenizers):
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)


def foreign_tokenizer(splits, words=()):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = splits(tokenizers)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(list(words))
    return tokenizer


FOREIGN = {
    "Metaspace": foreign_tokenizer(metaspace),
    "words over spaces": foreign_tokenizer(unsplit),
    "a space before each text": foreign_tokenizer(prefixed),
    "an added word with a space": foreign_tokenizer(
        lambda given: given.pre_tokenizers.ByteLevel(add_prefix_space=False), ["the lamp"]
    ),
    "trained here": train_tokenizer(TEXTS, 400),
}


@pytest.mark.parametrize("tokenizer", FOREIGN.values(), ids=FOREIGN)
def test_long_documents_have_the_ids_of_the_whole_text_with_any_tokenizer(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "PIECE", 50)
    text = "the lamp " * 40 + " ".join(TEXTS) + "the" * 50 + "\u2028ü" * 90 + " the lamp"
    ((_, ids),) = encode_texts(tokenizer, [("a", text)])
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_broken_documents_are_left_out_as_asked_counted_and_named(tmp_path, caplog):
    texts = write_lines(tmp_path / "a.jsonl", count=1500)
    train_tokenizer(TEXTS, 300).save(str(tmp_path / "own.json"))
    own = tmp_path / "own.json"
    for workers in (0, 1):  # read in this thread, and in another one
        with pytest.raises(ValueError, match=r"^\S+a.jsonl:98 cannot be read as JSON: Expec"):
            prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=own, workers=workers)
    skipping = text_documents(tmp_path / "a.jsonl", errors="skip")
    made = prepare(skipping, tmp_path / "out", vocab_size=300)
    named = made.train.metadata["first_broken"]
    assert (made.broken, len(named)) == (15, 10)
    assert named[1].startswith(f"{tmp_path}/a.jsonl:195 cannot be read")
    assert caplog.records[1].message == f"left out: {named[1]}"
    assert made.train.documents + made.held_out.documents == len(texts)
    assert not prepare(skipping, tmp_path / "out", vocab_size=300).is_new
    with pytest.raises(ValueError, match=r"a.jsonl:98 cannot be read as JSON"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=300)


def test_a_fatal_line_costs_nothing_of_what_came_before_it(tmp_path, small_steps):
    write_lines(tmp_path / "a.jsonl", broken=390)
    (tmp_path / "b.txt").write_text("more")
    train_tokenizer(TEXTS, 300).save(str(tmp_path / "own.json"))
    given = {"tokenizer": tmp_path / "own.json"}
    with pytest.raises(ValueError, match=r"a.jsonl:391 cannot be read"):
        prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out", **given)
    reports = []
    skipping = text_documents([tmp_path / "a.jsonl", tmp_path / "b.txt"], errors="skip")
    prepare(skipping, tmp_path / "out", **given, progress=lambda *to: reports.append(to))
    assert reports[0][1] > 0.8 * reports[0][2]


def test_documents_that_a_comprehension_leaves_out_are_in_no_token_file(tmp_path):
    texts = write_lines(tmp_path / "a.jsonl", broken=10**6)
    documents = text_documents(tmp_path / "a.jsonl")

    def kept(shortest):
        return [(name, text) for name, text in documents if len(text) > shortest]

    made = prepare(kept(30), tmp_path / "out", vocab_size=300)
    long = [text for text in texts if len(text) > 30]
    assert 0 < len(long) < len(texts)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert texts_of(made.held_out, tokenizer) == long[19::20]
    assert made.train.documents == len(long) - len(long[19::20])
    assert not prepare(kept(30), tmp_path / "out", vocab_size=300).is_new
    assert prepare(kept(40), tmp_path / "out", vocab_size=300).is_new


def test_nothing_left_is_an_error_that_says_where_it_went(tmp_path):
    write_lines(tmp_path / "a.jsonl", count=20, broken=7)
    documents = text_documents(tmp_path / "a.jsonl", errors="skip")
    (tmp_path / "a.jsonl").write_text("{\n{\n")
    message = r"no text to prepare: 2 documents are broken \(first: .*a.jsonl:1 cannot .*\)\. Name"
    with pytest.raises(ValueError, match=message):
        prepare(documents, tmp_path / "out")


def test_the_tokenizer_learns_from_a_sample_all_over_the_source(tmp_path):
    texts = write_lines(tmp_path / "a.jsonl", count=2000, broken=10**6)
    prepared = {}
    for limit in (20_000, 20_001, 10**9):
        out = tmp_path / f"out-{limit}"
        prepare(tmp_path / "a.jsonl", out, vocab_size=300, sample_bytes=limit)
        prepared[limit] = load_tokenizer(out).to_str()
    train = [text for number, text in enumerate(texts, start=1) if number % 20]
    assert prepared[10**9] == train_tokenizer(train, 300).to_str()
    assert prepared[20_000] != prepared[10**9]
    documents = text_documents(tmp_path / "a.jsonl")
    reader = prepare_corpus.TextReader(documents, 20, lambda *_: None)
    sample = list(reader.sample(20_000))
    assert 10_000 < sum(map(len, sample)) <= 20_000
    places = [train.index(text) for text in sample[:-1]]
    assert places == sorted(places)
    assert max(places) > 0.7 * len(train)
    assert min(places) < 0.1 * len(train)


def test_a_tokenizer_that_is_given_is_used_and_kept(source, tmp_path):
    own = train_tokenizer(TEXTS[:2], 290)
    own.add_special_tokens(["<|end|>"])
    own.save(str(tmp_path / "own.json"))
    given = {"tokenizer": tmp_path / "own.json", "held_out_every": 3}
    made = prepare(source, tmp_path / "out", **given, eos_token="<|end|>")
    assert (made.train.vocab_size, made.train.eos_id) == (291, 290)
    assert texts_of(made.train, load_tokenizer(tmp_path / "out")) == [
        TEXTS[i] for i in (0, 1, 3, 4)
    ]
    assert not prepare(source, tmp_path / "out", **given, eos_token="<|end|>").is_new
    message = r'no token .</s>.; its special tokens are "<|endoftext|>", "<|end|>". Name'
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        prepare(source, tmp_path / "other", **given, eos_token="</s>")


def test_shards_are_of_bounded_size_and_have_checksums(source, tmp_path):
    made = prepare(source, tmp_path / "out", vocab_size=300, held_out_every=3, shard_tokens=500)
    sizes = [len(shard) for shard in made.train.shards]
    assert set(sizes[:-1]) == {500}
    assert 0 < sizes[-1] <= 500
    whole = prepare(source, tmp_path / "whole", vocab_size=300, held_out_every=3)
    assert whole.train.fingerprint == made.train.fingerprint
    shard = tmp_path / "out" / "shard_00002.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert open_tokens(tmp_path / "out").fingerprint == made.train.fingerprint
    with pytest.raises(ValueError, match=r"shard_00002.npy has another checksum than .*chan"):
        open_tokens(tmp_path / "out", verify=True)


def test_one_process_at_a_time_prepares_a_folder(source, tmp_path):
    messages = []

    def meanwhile(stage, done, total):
        if not messages:
            with pytest.raises(FileExistsError, match=r"another process is writing .*/out. Wait"):
                prepare(source, tmp_path / "out", vocab_size=300)
            messages.append(stage)

    prepare(source, tmp_path / "out", vocab_size=300, progress=meanwhile)
    assert messages == ["tokenizer"]


def test_foreign_files_are_not_deleted(source, tmp_path):
    prepare(source, tmp_path / "out", vocab_size=300)
    (tmp_path / "out" / "model.pt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds files that were not written here"):
        prepare(source, tmp_path / "out", vocab_size=301)
    assert (tmp_path / "out" / "model.pt").exists()


def test_bad_arguments_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match=r"held_out_every 1 must be at least 2\."):
        prepare(source, tmp_path / "out", held_out_every=1)
    with pytest.raises(ValueError, match="sample_bytes 0 must be at least 1"):
        prepare(source, tmp_path / "out", sample_bytes=0)
    with pytest.raises(ValueError, match="vocab_size 100 must be at least 257"):
        prepare(source, tmp_path / "out", vocab_size=100)
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        prepare(tmp_path / "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()
