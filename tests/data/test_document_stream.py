"""Streams: every token once, on any number of readers, and exactly on from any micro-batch."""

from __future__ import annotations

import itertools
import json
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import TEXTS

from forgekit.data.batch import check_batch
from forgekit.data.documents import as_documents, huggingface_documents, random_documents
from forgekit.data.stream import stream_documents
from forgekit.data.text_files import text_documents
from forgekit.data.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(TEXTS, 300)


def stream_of(documents, seq_len=8, batch_size=2, **options):
    return stream_documents(documents, seq_len, batch_size, **{"eos_id": 0, **options})


def content(batch):
    return {key: batch[key].tolist() for key in sorted(batch.keys())}


def targets(batches):
    """Pairs of a token and the one that follows it in its document, in their order."""
    pairs = [torch.stack([b["input_ids"], b["labels"]], -1)[b["labels"] != -100] for b in batches]
    return [tuple(pair) for pair in torch.cat(pairs).tolist()]


def pairs_of(documents):
    """What a stream of these arrays must hold once, closing tokens included."""
    closed = [[*map(int, ids), 0] for ids in documents if len(ids)]
    return [pair for ids in closed for pair in pairwise(ids)]


def test_a_row_is_as_written_by_hand():
    """1 2 3 0 | 4 5 6 7 8 9 0: after a closing token nothing is left to predict in a row."""
    stream = stream_of([[1, 2, 3], [4, 5, 6, 7, 8, 9]], seq_len=6, epochs=1)
    (batch,) = stream
    check_batch(batch)
    assert content(batch) == {
        "doc_ids": [[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, -1]],
        "input_ids": [[1, 2, 3, 0, 4, 5], [6, 7, 8, 9, 0, 0]],
        "labels": [[2, 3, 0, -100, 5, 6], [7, 8, 9, 0, -100, -100]],
        "position_ids": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0]],
    }
    assert list(stream) == []


documents_strategy = st.lists(
    st.lists(st.integers(1, 9), max_size=12), min_size=1, max_size=12
).filter(any)


@given(documents_strategy, st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_every_token_that_follows_another_one_is_a_target_once(documents, seq_len, batch_size):
    batches = list(stream_of(documents, seq_len, batch_size, epochs=1))
    assert targets(batches) == pairs_of(documents)
    for batch in batches:
        check_batch(batch)
        assert batch["input_ids"].shape == (batch_size, seq_len)
        for row in batch:
            ids = row["doc_ids"].tolist()
            within = [ids[:at].count(number) * (number >= 0) for at, number in enumerate(ids)]
            assert row["position_ids"].tolist() == within


@given(documents_strategy, st.integers(1, 7), st.integers(1, 3), st.integers(0, 8))
@settings(max_examples=25, deadline=None)
def test_it_goes_on_exactly_from_any_micro_batch(documents, seq_len, batch_size, stop):
    first, second, whole = (stream_of(documents, seq_len, batch_size) for _ in range(3))
    list(islice(first, stop))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    expected = list(map(content, islice(whole, 12)))[stop:]
    assert list(map(content, islice(second, 12 - stop))) == expected


def test_files_of_texts_resume_exactly_on_every_rank(tmp_path):
    lines = [json.dumps({"text": f"{n} {text[:n]}"}) for n, text in enumerate(TEXTS * 5)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "b.txt").write_text(TEXTS[0])
    options = {"documents": text_documents(tmp_path), "tokenizer": TOKENIZER, "world": 2}
    for rank in range(2):
        undisturbed = stream_of(**options, rank=rank)
        states, batches = [undisturbed.state_dict()], []
        for batch in islice(undisturbed, 90):
            batches.append(content(batch))
            states.append(json.loads(json.dumps(undisturbed.state_dict())))
        assert undisturbed.cursor.epoch
        with stream_of(**options, rank=rank, workers=1) as resumed:
            for stop in (70, 0, 7):  # what was read ahead before is not read
                resumed.load_state_dict(states[stop])
                assert [content(batch) for batch in islice(resumed, 90 - stop)] == batches[stop:]


class _Torch(torch.utils.data.IterableDataset):
    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        for batch in islice(self.stream, self.count):
            yield {**batch, "reader": torch.tensor(worker)}


# Workers are forked here, which newer Pythons frown upon, and torch where there is one core.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning")
def test_workers_of_torchs_loader_share_the_documents_too():
    """Hugging Face divides its files among such workers once more, which would lose documents."""
    from datasets import Dataset

    rows = Dataset.from_dict({"text": TEXTS * 5}).to_iterable_dataset(num_shards=3)
    options = {"documents": huggingface_documents(rows), "tokenizer": TOKENIZER}
    stream = stream_of(**options, rank=1, world=2)
    loader = torch.utils.data.DataLoader(_Torch(stream, 5), batch_size=None, num_workers=2)
    found: dict = {0: [], 1: []}
    for batch in loader:
        found[int(batch.pop("reader"))].append(content(batch))
    for worker in (0, 1):
        alone = stream_of(**options, rank=2 + worker, world=4)
        assert found[worker] == [content(batch) for batch in islice(alone, 5)]


def test_epochs_follow_each_other_without_end_and_are_counted():
    def double(batch):
        return batch.set("input_ids", batch["input_ids"] * 2)

    stream = stream_of([[1, 2, 3], [4, 5]], 3, 1, transforms=[double])
    batches = list(islice(stream, 40))
    pairs = [(2 * token, label) for token, label in pairs_of([[1, 2, 3], [4, 5]])]
    assert targets(batches)[: 3 * 5] == 3 * pairs
    assert (stream.cursor.epoch, stream.is_endless) == (20, True)


def test_broken_documents_are_left_out_counted_and_named(tmp_path, caplog):
    lines = ['{"text": "abc"}', "{", '{"text": 1}', '{"text": "def"}', ""]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = {"tokenizer": TOKENIZER, "batch_size": 1}
    with pytest.raises(ValueError, match=r"a.jsonl:2 cannot be read as JSON"):
        list(stream_of(text_documents(tmp_path), **options, epochs=1))
    stream = stream_of(text_documents(tmp_path, errors="skip"), **options, epochs=1)
    kept = [[*TOKENIZER.encode(text).ids] for text in ("abc", "def")]
    assert (targets(stream), stream.cursor.broken) == (pairs_of(kept), 2)
    named = [record.message.split()[2] for record in caplog.records]
    assert [Path(name).name for name in named] == ["a.jsonl:2", "a.jsonl:3"]


def test_a_thread_goes_on_when_it_was_closed_and_its_errors_arrive():
    def failing(*position, **part):
        yield from as_documents(random_documents(9, 3)).read(*position)
        raise OSError("the disk is gone")

    whole = [content(batch) for batch in islice(stream_of(random_documents(9, 30)), 20)]
    with stream_of(random_documents(9, 30), workers=1) as ahead:
        assert [content(batch) for batch in islice(ahead, 7)] == whole[:7]
        ahead.close()
        assert [content(batch) for batch in islice(ahead, 13)] == whole[7:]
    assert ahead.wait_seconds > 0
    source = SimpleNamespace(read=failing, fingerprint="failing")
    with pytest.raises(OSError, match="the disk is gone"):
        list(stream_of(source, workers=1))


BAD = {
    "documents is a list_iterator; pass a list": {"documents": iter([[1]])},
    "reader 0 of 1 has no document .0 are broken": {"documents": [[]]},
    r"document 0 is <U1 of shape \(\)": {"documents": ["a"]},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_streamed_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        next(iter(stream_of(**{"documents": [[1]], **BAD[message]})))


class Uncounted:
    """Documents that can be read again and again, and that nobody has counted."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return ([number % self.count] * 3 for number in itertools.count(1))


LETTERS = {"tokenizer": TOKENIZER}
MOVED = {
    "lengths": ({"documents": [[1, 2], [3]]}, {"documents": [[1], [2, 3]]}),
    "texts": (LETTERS | {"documents": [("a", "one")]}, LETTERS | {"documents": [("a", "six")]}),
    "uncounted": ({"documents": Uncounted(5)}, {"documents": Uncounted(6)}),
    "reader 1 of 4, but this is reader 0 of 4": ({"rank": 1, "world": 4}, {"world": 4}),
    "reader 1 of 4, but this is reader 1 of 2": ({"rank": 1, "world": 4}, {"rank": 1, "world": 2}),
}


@pytest.mark.parametrize("case", MOVED)
def test_a_position_belongs_to_its_documents_and_to_its_reader(case):
    before, after = (stream_of(**{"documents": [[1]], **options}) for options in MOVED[case])
    before.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=case if "reader" in case else "is in other documents"):
        after.load_state_dict(before.state_dict())
