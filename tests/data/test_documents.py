"""Sources that are no files: collections and random tokens."""

from __future__ import annotations

import numpy as np

from forgekit.data.documents import as_documents, random_documents


def test_random_documents_are_those_of_their_seed_and_even():
    documents = random_documents(11, 300, longest=50, shortest=20, seed=3)
    lengths = [len(ids) for ids in documents]
    assert set(lengths) == set(range(20, 51))
    counts = np.bincount(np.concatenate(list(documents)))
    assert len(counts) == 11
    assert counts.min() > 0.85 * sum(lengths) / 11
    other = random_documents(11, 300, longest=50, shortest=20, seed=4)
    assert [ids.tolist() for ids in other] != [ids.tolist() for ids in documents]


def test_a_collection_may_hold_texts_arrays_or_named_ones():
    items = ["a", ("b.txt", "b"), [1, 2], ("c", np.array([3]))]
    records = list(as_documents(items).read())
    assert [record.name for record in records] == ["document 0", "b.txt", "document 2", "c"]
    assert [np.asarray(record.content).tolist() for record in records] == ["a", "b", [1, 2], [3]]
    shared = as_documents(as_documents(items)).read(1, part=1, parts=2)
    assert [record.name for record in shared] == ["b.txt", "c"]
