"""A checkpoint of other data is refused, and what changed is named."""

from __future__ import annotations

import pytest
from saved import build

import forgekit as fk
from forgekit.hashing import facts_of

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13]]
OTHER = [[1, 2, 3, 4, 6], *DOCUMENTS[1:]]


def tokens(folder, documents=DOCUMENTS, tokenizer="a"):
    if not folder.exists():
        fk.write_tokens(folder, documents, vocab_size=20, eos_id=0)
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def windows(out, seq_len=4, doc_ids=False, **options):
    name = f"tokens-{len(options)}-{options.get('tokenizer', 'a')}"
    return fk.token_dataset(tokens(out / name, **options), seq_len, doc_ids=doc_ids)


def packed(out, capacity=8, transforms=()):
    bins = fk.pack([5, 2, 6], capacity, method="best_fit")
    return fk.packed_dataset(tokens(out / "tokens"), bins, transforms=transforms)


def mixed(out, seed=0, seq_len=4):
    rows = {"a": windows(out, seq_len), "b": windows(out, seq_len, documents=OTHER)}
    sizes = {name: len(dataset) for name, dataset in rows.items()}
    return fk.mixture_dataset(rows, fk.make_order(sizes, seed=seed))


def same_rows(row):
    return row


THEN, NOW = r"\(4 then, 5 now\)", r"other data: what changed is: "
BOTH = {"documents": OTHER, "tokenizer": "b"}
CHANGES = {
    "doc_ids": (windows, {"doc_ids": True}, rf"{NOW}doc_ids \(False then, True now\)\. Choose an"),
    "files and tokenizer": (windows, BOTH, rf"{NOW}files, tokenizer\. Choose another run directo"),
    "capacity": (packed, {"capacity": 9}, rf"{NOW}sequence length \(8 then, 9 now\), packing\."),
    "transforms": (packed, {"transforms": (same_rows,)}, rf"{NOW}transforms\. Choose another"),
    "seed of the order": (mixed, {"seed": 1}, rf"{NOW}order\. Choose another run directory"),
    "length of sources": (
        mixed,
        {"seq_len": 5},
        rf"{NOW}order, sources: a: sequence length {THEN}, sources: b: sequence length {THEN}\.",
    ),
}


@pytest.mark.parametrize(("make", "change", "message"), CHANGES.values(), ids=CHANGES)
def test_other_data_are_refused_by_what_changed(tmp_path, make, change, message):
    then, now = make(tmp_path).fingerprint, make(tmp_path, **change).fingerprint
    fk.checkpoint_save(build(step=2), tmp_path / "a", fingerprint=then, blocking=True)
    state = build()
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path / "a", fingerprint=now)
    assert state.step == 0
    again = fk.checkpoint_load(state, tmp_path / "a", fingerprint=make(tmp_path).fingerprint)
    again = fk.checkpoint_load(again, tmp_path / "a")  # nothing to compare
    allowed = fk.checkpoint_load(again, tmp_path / "a", fingerprint=now, allow_other_data=True)
    assert allowed.step == 2


def test_a_tokenizer_that_is_gone_changes_no_tokens(tmp_path):
    dataset = windows(tmp_path)
    fk.checkpoint_save(build(step=2), tmp_path, fingerprint=dataset.fingerprint, blocking=True)
    (dataset.file.path / "tokenizer.json").unlink()
    dataset = fk.token_dataset(dataset.file, dataset.seq_len)
    assert facts_of(dataset.fingerprint)["tokenizer"] is None
    assert fk.checkpoint_load(build(), tmp_path, fingerprint=dataset.fingerprint).step == 2
