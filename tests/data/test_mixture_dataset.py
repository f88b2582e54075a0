"""A mixture's rows are its samples, in any loader, before, across and after a change."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import forgekit as fk


def rows(number, n):
    """Row ``i`` is made of the numbers of the dataset and of the row."""
    ids = torch.tensor([[number, row] for row in range(n)])
    return [TensorDict({"input_ids": row, "labels": row}) for row in ids]


class Batched(list):
    def __getitems__(self, rows):
        return [self[row] for row in rows]


def mixture(phases=(), seed=4):
    datasets = {"a": rows(0, 50), "b": Batched(rows(1, 31)), "c": rows(2, 9)}
    sizes = {name: len(dataset) for name, dataset in datasets.items()}
    order = fk.make_order(sizes, {"a": 5, "b": 3, "c": 1}, seed=seed, phases=phases)
    return fk.mixture_dataset(datasets, order)


def rows_of(batch):
    assert batch["source"].equal(batch["input_ids"][:, 0])
    assert batch["labels"].equal(batch["input_ids"])
    return [tuple(row) for row in batch["input_ids"].tolist()]


PHASES = (fk.Phase(100, {"a": 0, "c": 9}), fk.Phase(161, {"b": 0}), fk.Phase(1300, {"c": 0}))


def test_row_i_of_a_mixture_is_sample_i():
    data = mixture(PHASES)
    samples = [0, 161, 3, 3, 10**12, 160]
    expected = [(data.order.sources.index(name), row) for name, row in map(data.order, samples)]
    assert rows_of(data.__getitems__(samples)) == expected
    assert [tuple(data[sample]["input_ids"].tolist()) for sample in samples] == expected
    for options in ({"seed": 5}, {"shuffle": False}):
        loader = fk.make_loader(mixture(), 8, **options)
        assert rows_of(next(iter(loader))) == rows_of(mixture().__getitems__(range(8)))
        assert loader.is_endless
    fk.check_batch(data.__getitems__(samples))


def test_a_mixture_of_token_files_is_that_of_its_files(tmp_path):
    parts = {}
    for name in ("code", "prose"):
        documents = [[len(name), number, 1] for number in range(2, 30)]
        file = fk.write_tokens(tmp_path / name, documents, vocab_size=32 + len(name), eos_id=0)
        parts[name] = fk.token_dataset(file, seq_len=8, doc_ids=True)
    order = fk.make_order({name: len(part) for name, part in parts.items()})
    data = fk.mixture_dataset(parts, order)
    batch = next(iter(fk.make_loader(data, 16)))
    fk.check_batch(batch)
    for source, ids in zip(batch["source"].tolist(), batch["input_ids"], strict=True):
        assert (4 if source == 0 else 5) in ids.tolist()
    assert data.seq_len == 8
    swapped = {"code": parts["prose"], "prose": parts["code"]}
    assert fk.mixture_dataset(swapped, order).fingerprint != data.fingerprint
    assert data.fingerprint_at(0) == data.fingerprint_at(10**9) == data.fingerprint
    with pytest.raises(ValueError, match=r"vocab_size 36 of the model is below the 37 of .*/prose"):
        fk.check_vocabulary(data, 36)


def odd_rows(**tensors):
    return [TensorDict(tensors)] * 5


ODD = {"a": odd_rows(x=torch.ones(2)), "b": odd_rows(x=torch.ones(3))}
BAD = {
    r"^the datasets have \{'a': 5\} rows; .* is for \{'a': 5, 'b': 5\}": ("ab", ODD["a"]),
    r'^source "b" has .*\[3\].*, but source "a" .*\[2\]': ("ab", *ODD.values()),
    '^rows already have "source"': ("a", odd_rows(source=torch.ones(()))),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_mixed_is_refused(message):
    names, *datasets = BAD[message]
    order = fk.make_order(dict.fromkeys(names, 5))
    with pytest.raises(ValueError, match=message):
        fk.mixture_dataset(dict(zip(names, datasets, strict=False)), order).__getitems__(range(9))
