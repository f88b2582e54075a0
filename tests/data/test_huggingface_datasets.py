"""Hugging Face datasets, whole, streamed and on this disk, all without a network."""

from __future__ import annotations

import json

import pytest

from forgekit.data import documents as sources
from forgekit.data.documents import huggingface_documents

TEXTS = [f"text {number}" for number in range(23)]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    import datasets  # takes seconds, and who only collects these tests needs it not

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def whole(key="text"):
    from datasets import Dataset

    return Dataset.from_dict({key: TEXTS, "id": list(range(23))})


def generated():
    from datasets import IterableDataset

    def rows(names):
        for name in names:
            yield from ({"text": f"{name} {number}"} for number in range(9))

    return IterableDataset.from_generator(rows, gen_kwargs={"names": ["a", "b", "c"]})


def interleaved():
    from datasets import interleave_datasets

    return interleave_datasets([generated(), generated()], probabilities=[0.3, 0.7], seed=3)


def joined():
    from datasets import concatenate_datasets

    ids = whole("title").select_columns("title").to_iterable_dataset(num_shards=1)
    return concatenate_datasets([whole().to_iterable_dataset(num_shards=3), ids], axis=1)


def doubled(batch):
    return {"text": [text + "!" for text in batch["text"] for _ in range(2)]}


def content(record):
    return record.name, record.content


KINDS = {
    "whole": whole,
    "chosen": lambda: whole().select([5, 3, 8, 1]).shuffle(seed=1),
    "streamed": lambda: whole().to_iterable_dataset(num_shards=4),
    "formatted": lambda: whole().to_iterable_dataset(num_shards=4).with_format("arrow"),
    "generated": generated,
    "filtered": lambda: generated().filter(lambda row: row["text"][-1] != "3"),
    "mapped": lambda: (
        whole()
        .select_columns("text")
        .to_iterable_dataset(num_shards=4)
        .map(doubled, batched=True, batch_size=3)
    ),
    "taken": lambda: whole().to_iterable_dataset(num_shards=3).skip(4).take(13),
    "interleaved": interleaved,
    "repeated": lambda: generated().take(7).repeat(2),
    "joined": joined,
}


@pytest.mark.parametrize(
    ("kind", "at_once"), list(zip(KINDS, [1, 4, 256, 4, 256, 4, 1, 4, 4, 4, 4], strict=True))
)
def test_parts_are_disjoint_and_go_on_exactly_from_every_row(monkeypatch, kind, at_once):
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", at_once)
    documents = huggingface_documents(KINDS[kind]())
    expected = [row["text"] for row in KINDS[kind]().with_format(None)]
    assert [text for _, text in documents] == expected
    for parts in (1, 3, 5):
        texts = []
        for part in range(parts):
            records = list(documents.read(part=part, parts=parts))
            texts += [record.content for record in records]
            assert len({record.name for record in records}) == len(records)
            for number in range(0, len(records), 2):
                after = json.loads(json.dumps(records[number].after))
                following = documents.read(after, part=part, parts=parts)
                assert list(map(content, following)) == list(map(content, records[number + 1 :]))
        assert sorted(texts) == sorted(expected)


def test_a_stream_that_would_lose_documents_is_refused():
    from datasets.distributed import split_dataset_by_node

    shuffled = whole().to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=7)
    for dataset in (shuffled, shuffled.map(lambda row: row), shuffled.take(9)):
        with pytest.raises(ValueError, match="has a shuffle buffer, whose documents"):
            huggingface_documents(dataset)
    divided = split_dataset_by_node(whole().to_iterable_dataset(), 0, 2)
    with pytest.raises(ValueError, match=r"divided by split_dataset_by_node; pass it wh"):
        huggingface_documents(divided)


def test_datasets_on_this_disk_need_no_network(tmp_path):
    from datasets import DatasetDict

    parts = DatasetDict({"train": whole(), "test": whole().select([1, 2])})
    parts.save_to_disk(tmp_path / "dict")
    whole().save_to_disk(tmp_path / "one")
    (tmp_path / "files").mkdir()
    whole().to_parquet(tmp_path / "files" / "train.parquet")
    for name, streaming in (("dict", True), ("one", True), ("files", True), ("files", False)):
        documents = huggingface_documents(tmp_path / name, streaming=streaming)
        assert [text for _, text in documents] == TEXTS
    assert len(list(huggingface_documents(str(tmp_path / "dict"), split="test"))) == 2
    with pytest.raises(ValueError, match=r'the dataset has no split "dev"; it has "train", "test"'):
        huggingface_documents(tmp_path / "dict", split="dev")


@pytest.mark.parametrize("make", [lambda d: d, lambda d: d.to_iterable_dataset()], ids=["w", "s"])
def test_what_is_no_text_is_refused_or_left_out(make):
    from datasets import Dataset

    rows = make(Dataset.from_dict({"text": ["a", None, " ", "b"], "id": [1, 2, 3, 4]}))
    with pytest.raises(ValueError, match=r'row 1 has NoneType in column "text"'):
        list(huggingface_documents(rows))
    documents = huggingface_documents(rows, errors="skip")
    assert list(documents) == [("row 0", "a"), ("row 3", "b")]
    assert [record.name for record in documents.read() if record.problem] == ["row 1"]
    for source in (rows, generated()):  # whose columns are known only while they are read
        with pytest.raises(ValueError, match=r'has no column "body"; it has "text".* Name one w'):
            list(huggingface_documents(source, text_key="body"))


def test_a_dataset_is_known_by_its_own_fingerprint(tmp_path):
    whole().save_to_disk(tmp_path / "rows")
    for same in (tmp_path / "rows", whole()):
        assert len({huggingface_documents(same).fingerprint for _ in range(2)}) == 1
    others = [whole().select(range(22)), whole().shuffle(seed=2), whole().to_iterable_dataset()]
    assert len({huggingface_documents(other).fingerprint for other in [whole(), *others]}) == 4
