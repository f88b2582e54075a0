"""Sources become token files and a tokenizer, all at once, and only when something changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tracemalloc
from functools import partial
from unittest import mock

import pytest
import tokenizers
from pool import run_ranks
from texts import CORPUS, TEXTS, content_of, small_steps, write_lines
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forgekit.data import prepare_corpus
from forgekit.data import stream as streaming
from forgekit.data import tokenizer as encoding
from forgekit.data.prepare_corpus import prepare
from forgekit.data.rows import token_dataset
from forgekit.data.stream import stream_documents
from forgekit.data.text_files import text_documents
from forgekit.data.token_files import open_tokens
from forgekit.data.tokenizer import encode_texts, load_tokenizer, train_tokenizer


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(CORPUS, tmp_path / "source")


def texts_of(file, tokenizer):
    bounds = zip(file.offsets[:-1].tolist(), file.offsets[1:].tolist(), strict=True)
    return [tokenizer.decode(file.read(start, stop - 1).tolist()) for start, stop in bounds]


def test_every_nth_document_is_held_out_and_nothing_is_prepared_twice(source, tmp_path):
    parts = []

    def again(documents=source, vocab_size=300):
        options = {"held_out_every": 3, "progress": parts.append}
        return prepare(documents, tmp_path / "out", vocab_size=vocab_size, **options)

    made = again()
    assert made.is_new
    tokenizer = load_tokenizer(made.path)
    for file, numbers in ((made.train, (0, 1, 3, 4)), (made.held_out, (2, 5))):
        texts = texts_of(file, tokenizer)
        assert texts == [TEXTS[number] for number in numbers]
        size = len("".join(texts).encode())
        assert file.metadata["text_bytes"] == size
        assert token_dataset(file, 8).bytes_per_token == size / file.tokens
        assert (file.vocab_size, file.eos_id) == (300, 0)
    assert parts == [1]
    before = content_of(tmp_path / "out")
    parts.clear()
    assert not again().is_new
    assert not parts
    assert content_of(tmp_path / "out") == before
    assert again(vocab_size=301).is_new
    os.utime(source / "bread.md", ns=(1, 1))
    assert again(vocab_size=301).is_new
    (tmp_path / "out" / "heldout" / "shard_00000.npy").write_bytes(b"")
    assert again(vocab_size=301).is_new
    pairs = list(text_documents(source))
    made = again(pairs)
    assert texts_of(made.held_out, load_tokenizer(made.path)) == [TEXTS[2], TEXTS[5]]
    assert not again(pairs.copy()).is_new
    assert again(pairs[1:]).is_new


def test_few_documents_are_cut_at_a_line_and_nothing_is_lost(tmp_path):
    made = prepare(CORPUS / "lighthouse.txt", tmp_path / "out", vocab_size=300, held_out_every=4)
    tokenizer = load_tokenizer(made.path)
    (train,), (held_out,) = (texts_of(file, tokenizer) for file in (made.train, made.held_out))
    assert train + held_out == (CORPUS / "lighthouse.txt").read_text()
    assert train.endswith("\n")
    assert len(held_out) >= len(train + held_out) // 4


def _killed(rank, world, source, out, vocab_size, after):
    """Prepare in a child that dies when it has written so many parts."""
    small_steps(mock.Mock(setattr=setattr))

    def report(parts):
        if parts == after:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        documents = text_documents(source, errors="skip")
        prepare(documents, out, vocab_size=vocab_size, progress=report)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill(*arguments):
    assert run_ranks(_killed, 1, *arguments, group=False) == [signal.SIGKILL]


def test_a_kill_leaves_the_old_one_and_the_next_call_goes_on(tmp_path, monkeypatch):
    small_steps(monkeypatch)
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(file)
    skipping = text_documents(file, errors="skip")
    prepare(skipping, out, vocab_size=299)
    before = content_of(out)
    kill(file, out, 300, 3)
    kill(file, out, 300, 8)
    assert content_of(out) == before
    # A finished part hides no fatal line, and parts may be finished out of turn.
    with pytest.raises(ValueError, match=r"a.jsonl:98 cannot be read"):
        prepare(file, out, vocab_size=300)
    with pytest.raises(ValueError, match="vocab_size 100"):
        prepare(file, out, vocab_size=100)
    (left,) = tmp_path.glob(".out.*")
    (left / "parts" / "000002.npz").unlink()
    parts, all_parts = [], []
    assert prepare(skipping, out, vocab_size=300, progress=parts.append).broken == 4
    prepare(skipping, tmp_path / "fresh", vocab_size=300, progress=all_parts.append)
    assert 10 < len(parts) == len(all_parts) - 10
    assert content_of(out) == content_of(tmp_path / "fresh")
    open_tokens(out, verify=True)
    kill(file, out, 302, 1)
    assert any(tmp_path.glob(".out.*"))
    prepare(skipping, out, vocab_size=301)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "fresh", "out"]


def test_memory_does_not_depend_on_the_amount_of_text(tmp_path, monkeypatch):
    small_steps(monkeypatch, part=2**15)
    lines = [json.dumps({"text": f"the cat sat on a mat {number} " * 100}) for number in range(40)]
    peaks = []
    for times in (2, 9):
        (tmp_path / "a.jsonl").write_text("\n".join(lines * times))
        tracemalloc.start()
        options = {"vocab_size": 260, "sample_bytes": 10_000, "shard_tokens": 2**14}
        prepare(tmp_path / "a.jsonl", tmp_path / "out", **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1e5 < (tmp_path / "a.jsonl").stat().st_size / 8


def foreign_tokenizer(splits, words=()):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = splits
    options = {"initial_alphabet": sorted(ByteLevel.alphabet()), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, **options)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(list(words))
    return tokenizer


FOREIGN = {
    "Metaspace": foreign_tokenizer(tokenizers.pre_tokenizers.Metaspace()),
    "words over spaces": foreign_tokenizer(ByteLevel(add_prefix_space=False, use_regex=False)),
    "a space before each text": foreign_tokenizer(ByteLevel(add_prefix_space=True)),
    "an added word": foreign_tokenizer(ByteLevel(add_prefix_space=False), ["the lamp"]),
    "trained here": train_tokenizer(TEXTS, 400),
}


@pytest.mark.parametrize("tokenizer", FOREIGN.values(), ids=FOREIGN)
def test_long_documents_have_the_ids_of_the_whole_text_with_any_tokenizer(tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "PIECE", 50)
    monkeypatch.setattr(encoding, "AT_ONCE", 300)
    long = "the lamp " * 40 + "\n\n  two  spaces\t\r\n".join(TEXTS) + "the" * 50 + "\u2028ü" * 90
    for text, ids in encode_texts(tokenizer, [(text, text) for text in (long, "", TEXTS[0])]):
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_broken_documents_are_left_out_as_asked_counted_and_named(tmp_path, caplog):
    file, own = tmp_path / "a.jsonl", tmp_path / "own.json"
    texts = write_lines(file, count=1500)
    train_tokenizer(TEXTS, 300).save(str(own))
    skipping = text_documents(file, errors="skip")
    made = prepare(skipping, tmp_path / "out", tokenizer=own)
    named = made.train.metadata["first_broken"]
    assert (made.broken, len(named)) == (15, 10)
    assert named[1].startswith(f"{file}:195 cannot be read")
    assert caplog.records[1].message == f"left out: {named[1]}"
    assert made.train.documents + made.held_out.documents == len(texts)
    assert not prepare(skipping, tmp_path / "out", tokenizer=own).is_new
    file.write_text("{\n{\n")
    with pytest.raises(ValueError, match="there are no documents"):
        prepare(skipping, tmp_path / "out", tokenizer=own)


def test_the_tokenizer_learns_from_a_sample_all_over_the_training_documents(tmp_path):
    texts = write_lines(tmp_path / "a.jsonl", count=1000, broken=10**6)
    train = [text for number, text in enumerate(texts, start=1) if number % 20]
    reader = prepare_corpus.TextReader(text_documents(tmp_path / "a.jsonl"), 20)
    sample = list(reader.sample(10_000))
    assert 5_000 < sum(map(len, sample)) <= 10_000
    places = [train.index(text) / len(train) for text in sample[:-1]]
    assert places == sorted(places)
    assert places[0] < 0.1 < 0.7 < places[-1]
    for size, learnt in ((10**9, train), (10_000, sample)):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=280, sample_bytes=size)
        assert load_tokenizer(tmp_path / "out").to_str() == train_tokenizer(learnt, 280).to_str()


def test_a_tokenizer_that_is_given_is_used_without_its_limits_and_texts_stay_text(tmp_path):
    own = train_tokenizer(TEXTS[:2], 290)
    own.add_special_tokens(["<|end|>"])
    own.enable_truncation(max_length=5)
    own.enable_padding(length=400, pad_id=7)
    content = json.loads(own.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 900  # ids may have gaps
    (tmp_path / "own.json").write_text(json.dumps(content))
    text = "one<|endoftext|>two\r\nthree\u0000\ufefffour<|end|>"
    given = {"tokenizer": tmp_path / "own.json", "held_out_every": 2}
    made = prepare([("a", text), ("b", "b")], tmp_path / "out", **given, eos_token="<|end|>")
    assert (made.train.vocab_size, made.train.eos_id) == (901, 290)
    kept = load_tokenizer(tmp_path / "out")
    assert (kept.truncation, kept.padding) == (None, None)
    ids = made.train.read(0, made.train.tokens).tolist()
    assert (ids[-1], ids.count(0), ids.count(290)) == (290, 0, 1)
    assert texts_of(made.train, kept) == [text]
    with pytest.raises(ValueError, match=r'no token .</s>.; .* "<\|endoftext\|>", "<\|end\|>"'):
        prepare(CORPUS, tmp_path / "other", **given, eos_token="</s>")


def test_one_process_at_a_time_prepares_a_folder_and_foreign_files_stay(source, tmp_path):
    def meanwhile(_parts):
        with pytest.raises(FileExistsError, match=r"another process is writing .*/out. Wait"):
            prepare(source, tmp_path / "out", vocab_size=300)

    assert prepare(source, tmp_path / "out", vocab_size=300, progress=meanwhile).is_new
    (tmp_path / "out" / "model.pt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"contains files that were not written here"):
        prepare(source, tmp_path / "out", vocab_size=301)
    assert (tmp_path / "out" / "model.pt").exists()


def beginning(normalizer=None, adds="<s> $A"):
    """A tokenizer whose own encoding adds ``<s>``, id 260, and the like."""
    own = train_tokenizer(TEXTS, 260)
    own.add_special_tokens(["<s>", "</s>"])
    own.add_tokens(["lamp"])
    own.normalizer = normalizer
    specials = [("<s>", 260), ("</s>", 261)]
    own.post_processor = TemplateProcessing(single=adds, special_tokens=specials)
    return own


@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("normalizer", [NFC(), None])
def test_ids_are_those_of_transformers_and_begin_as_its_own(
    tmp_path, monkeypatch, adds, normalizer
):
    monkeypatch.setattr(encoding, "PIECE", 20)
    file = str(tmp_path / "own.json")
    beginning(normalizer, adds).save(file)
    theirs, own = PreTrainedTokenizerFast(tokenizer_file=file), load_tokenizer(file)
    texts = ["cafe\u0301 and the lamp\r\n", "two " * 30, "x\ufeff\u0000"]
    for text, ids in encode_texts(own, [(text, text) for text in texts]):
        expected = theirs(text)["input_ids"]
        assert ids.tolist() == (expected[:-1] if "</s>" in adds else expected)
        assert ids[0] == 260
    assert theirs("a<s>")["input_ids"].count(260) == 2  # a special token in a text
    ((_, plain),) = encode_texts(own, [("", "a<s>")])
    assert plain.tolist().count(260) == 1


NAMED = {"eos_token": "</s>", "bos_token": "<s>"}
DIRECTORIES = {  # files beside tokenizer.json
    "nothing": {},
    "no end": {"tokenizer_config": {"eos_token": None}},
    "a name": {"tokenizer_config": NAMED},
    "a token": {"tokenizer_config": {"eos_token": {"content": "</s>", "__type": "AddedToken"}}},
    "a map": {"special_tokens_map": NAMED},
    "a map and another": {"special_tokens_map": NAMED, "tokenizer_config": {"eos_token": "<s>"}},
    "Llama": {"tokenizer_config": {**NAMED, "tokenizer_class": "LlamaTokenizerFast"}},
    "GPT-2": {"tokenizer_config": {**NAMED, "eos_token": "<|endoftext|>"}},
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_documents_begin_and_end_as_the_tokenizer_of_a_directory_says(tmp_path, name):
    settings = {
        "$A": {"add_bos_token": True},
        "<s> $A": {"add_bos_token": False},
        "<s> $A </s>": {},
    }
    for number, (adds, said) in enumerate(settings.items()):
        (folder := tmp_path / str(number)).mkdir()
        beginning(adds=adds).save(str(folder / "tokenizer.json"))
        files = DIRECTORIES[name]
        for file in (*files, *(["tokenizer_config"] if said else [])):
            also = said if file == "tokenizer_config" else {}
            (folder / f"{file}.json").write_text(json.dumps({**files.get(file, {}), **also}))
        theirs = AutoTokenizer.from_pretrained(folder)
        end = 0 if theirs.eos_token_id is None else theirs.eos_token_id
        expected = [theirs(text)["input_ids"] for text in ("one", "two")]
        expected = [[*(ids[:-1] if ids[-1] == 261 else ids), end] for ids in expected]
        pairs = [("a", "one"), ("b", "two")]
        made = prepare(pairs, tmp_path / "out", tokenizer=folder, held_out_every=2)
        read = [file.read(0, file.tokens).tolist() for file in (made.train, made.held_out)]
        assert (read, made.train.eos_id) == (expected, end)
        (batch,) = stream_documents(["one", "two"], 20, 1, tokenizer=folder, epochs=1)
        ids = batch["input_ids"][batch["doc_ids"] >= 0].tolist()
        assert ids == [*expected[0], *expected[1]][: len(ids)]
        assert len(ids) >= len(expected[0] + expected[1]) - 1


def test_the_end_that_a_directory_names_is_part_of_what_was_made(tmp_path):
    own, pairs = beginning(), [("a", "one"), ("b", "two")]
    own.save(str(tmp_path / "tokenizer.json"))
    own.save(str(tmp_path / "own.json"))
    made = partial(prepare, pairs, tmp_path / "out", held_out_every=2)
    assert made(tokenizer=tmp_path).train.eos_id == 0
    assert not made(tokenizer=tmp_path, eos_token="<|endoftext|>").is_new
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"eos_token": "</s>"}')
    assert made(tokenizer=tmp_path).train.eos_id == 261
    assert not made(tokenizer=tmp_path / "tokenizer.json", eos_token="</s>").is_new
    assert made(tokenizer=tmp_path / "own.json").train.eos_id == 0  # the settings are another's
    settings.write_text('{"eos_token": "<unknown>"}')
    with pytest.raises(ValueError, match="the tokenizer has no token '<unknown>'; its special"):
        made(tokenizer=tmp_path)
    for broken in ("[]", "{"):
        settings.write_text(broken)
        with pytest.raises(ValueError, match=r"_config.json is not a JSON object: .*Pass eos_to"):
            stream_documents(pairs, 4, 1, tokenizer=tmp_path)
        assert made(tokenizer=tmp_path, eos_token="<s>").train.eos_id == 260


def test_a_token_that_begins_documents_is_part_of_what_was_made(tmp_path, monkeypatch):
    own = beginning()
    own.save(str(tmp_path / "own.json"))
    given = {"tokenizer": tmp_path / "own.json", "eos_token": "</s>", "held_out_every": 2}
    pairs = [("a", "one"), ("b", "two")]

    def stream():
        loaded = load_tokenizer(tmp_path / "own.json")
        return stream_documents(["one", "two"], 2, 1, tokenizer=loaded, eos_id=261)

    with monkeypatch.context() as earlier:
        for module in (prepare_corpus, encoding, streaming):
            earlier.setattr(module, "beginning_ids", lambda _: [])
        assert prepare(pairs, tmp_path / "out", **given).is_new
        position = stream().state_dict()
    assert prepare(pairs, tmp_path / "out", **given).is_new
    assert not prepare(pairs, tmp_path / "out", **given).is_new
    stream().load_state_dict(stream().state_dict())
    with pytest.raises(ValueError, match="the position is in other documents"):
        stream().load_state_dict(position)
