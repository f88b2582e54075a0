"""A checkpoint of other data is refused, and what changed is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forgekit as fk
from forgekit.hashing import facts_of

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13]]


def build(step=0):
    model = nn.Linear(2, 2)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return fk.donate(state, step=step, samples=4 * step)


def tokens(folder, documents=DOCUMENTS, tokenizer="a"):
    if not folder.exists():
        fk.write_tokens(folder, documents, vocab_size=20, eos_id=0)
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


OTHER = [[1, 2, 3, 4, 6], [6, 7], [8, 9, 10, 11, 12, 13]]


def windows(out, seq_len=4, doc_ids=False, **options):
    name = f"tokens-{len(options)}-{options.get('tokenizer', 'a')}"
    return fk.token_dataset(tokens(out / name, **options), seq_len, doc_ids=doc_ids)


def packed(out, capacity=8, transforms=(), method="best_fit"):
    path = tokens(out / "tokens")
    bins = fk.pack([5, 2, 6], capacity, method=method)
    return fk.packed_dataset(path, bins, transforms=transforms)


def mixed(out, seed=0, weights=None, seq_len=4):
    rows = {"a": windows(out, seq_len), "b": windows(out, seq_len, documents=OTHER)}
    sizes = {name: len(dataset) for name, dataset in rows.items()}
    order = fk.make_order(sizes, weights, seed=seed)
    return fk.mixture_dataset(rows, order)


def same_rows(row):
    return row


THEN, NOW = r"\(4 then, 5 now\)", r"other data: what changed is: "
CHANGES = {
    "sequence length": (windows, {"seq_len": 5}, rf"{NOW}sequence length {THEN}\. Choose"),
    "doc_ids": (windows, {"doc_ids": True}, rf"{NOW}doc_ids \(False then, True now\)\. Choose an"),
    "files": (windows, {"documents": OTHER}, rf"{NOW}files\. Choose another run directory"),
    "tokenizer": (windows, {"tokenizer": "b"}, rf"{NOW}tokenizer\. Choose another run directory"),
    "files and tokenizer": (
        windows,
        {"documents": OTHER, "tokenizer": "b"},
        rf"{NOW}files, tokenizer\. Choose another run directory",
    ),
    "capacity": (packed, {"capacity": 9}, rf"{NOW}sequence length \(8 then, 9 now\), packing\."),
    "transforms": (packed, {"transforms": (same_rows,)}, rf"{NOW}transforms\. Choose another"),
    "seed of the order": (mixed, {"seed": 1}, rf"{NOW}order\. Choose another run directory"),
    "weights": (mixed, {"weights": {"a": 1, "b": 5}}, rf"{NOW}order\. Choose another run"),
    "length of sources": (
        mixed,
        {"seq_len": 5},
        rf"{NOW}order, sources: a: sequence length {THEN}, sources: b: sequence length {THEN}\.",
    ),
}


@pytest.mark.parametrize(("make", "change", "message"), CHANGES.values(), ids=CHANGES)
def test_other_data_are_refused_by_what_changed(tmp_path, make, change, message):
    checkpoints = tmp_path / "checkpoints"
    fk.checkpoint_save(build(2), checkpoints, fingerprint=make(tmp_path).fingerprint, blocking=True)
    now = make(tmp_path, **change).fingerprint
    state = build()
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, checkpoints, fingerprint=now)
    assert state.step == 0
    again = fk.checkpoint_load(state, checkpoints, fingerprint=make(tmp_path).fingerprint)
    assert again.step == 2
    allowed = fk.checkpoint_load(again, checkpoints, fingerprint=now, allow_other_data=True)
    assert allowed.step == 2


def test_a_tokenizer_that_is_gone_changes_no_tokens(tmp_path):
    dataset = windows(tmp_path)
    fk.checkpoint_save(build(2), tmp_path, fingerprint=dataset.fingerprint, blocking=True)
    (dataset.file.path / "tokenizer.json").unlink()
    dataset = fk.token_dataset(dataset.file, dataset.seq_len)
    assert facts_of(dataset.fingerprint)["tokenizer"] is None
    state = fk.checkpoint_load(build(), tmp_path, fingerprint=dataset.fingerprint)
    assert state.step == 2
