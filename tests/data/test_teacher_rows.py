"""A teacher's rows stay with the token that they were stored for, from a file to a rank's slice."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.data.batch import mask_batch, pad_positions, shift_labels
from forgekit.data.text_files import text_documents
from forgekit.data.tokenizer import train_tokenizer
from forgekit.rollouts import join_rollouts

LENGTHS = (5, 1, 9, 4)
TOKENS = sum(LENGTHS) + len(LENGTHS)


def document(first, length, k=3):
    """Token ``n`` of all has the id ``n``, and a row of ``n + 30``, ``n + 60``, ..."""
    ids = np.arange(first, first + length)
    teacher = ids[:, None] + 30 * np.arange(1, k + 1)
    return {"input_ids": ids, "teacher_ids": teacher, "teacher_log_probs": log_probs_of(ids, k)}


def log_probs_of(ids, k=3):
    return np.log(np.asarray(ids)[:, None] / 100 / np.arange(2, k + 2))


def documents(**options):
    return [document(1 + sum(LENGTHS[:n]), length, **options) for n, length in enumerate(LENGTHS)]


@pytest.fixture
def file(tmp_path):
    return fk.write_tokens(tmp_path / "a", documents(), vocab_size=150, eos_id=0, shard_tokens=18)


def check_rows(batch):
    """Each text position has its own row, closing tokens and padding have none."""
    ids, teacher = batch["input_ids"], batch["teacher_ids"]
    is_text = ids != 0
    wanted = ids[..., None] + 30 * torch.arange(1, 4)
    assert torch.equal(teacher[is_text].long(), wanted[is_text])
    assert (teacher[~is_text] == -100).all()
    expected = torch.from_numpy(log_probs_of(ids[is_text])).float()
    assert torch.equal(batch["teacher_log_probs"][is_text], expected)
    return int(is_text.sum())


@pytest.mark.parametrize("options", [{}, {"doc_ids": True}], ids=str)
def test_windows_have_the_rows_of_their_own_positions(file, options):
    assert len(file.shards) > 2  # rows cross from one into the next
    rows = fk.token_dataset(file, 7, **options)
    batch = rows.__getitems__(range(len(rows)))
    assert check_rows(batch) == sum(LENGTHS)
    assert ("doc_ids" in batch) == bool(options)
    at_text = (batch["input_ids"] != 0) & (batch["labels"] > 0)
    assert (batch["labels"] == batch["input_ids"] + 1)[at_text].all()


@pytest.mark.parametrize("align", [1, 4])
def test_packed_rows_and_split_documents_keep_theirs(file, align):
    bins = fk.pack(np.diff(file.offsets), 8, align=align)
    rows = fk.packed_dataset(file.path, bins)
    assert check_rows(rows.__getitems__(range(len(rows)))) == sum(LENGTHS)


def test_an_old_token_file_is_what_it_was(tmp_path):
    plain = [each["input_ids"] for each in documents()]
    file = fk.write_tokens(tmp_path / "a", plain, vocab_size=150, eos_id=0)
    stored = np.load(tmp_path / "a" / "shard_00000.npy")
    assert (stored.dtype, len(stored)) == (np.uint16, TOKENS)
    assert "teacher_k" not in json.loads((tmp_path / "a" / "index.json").read_text())
    assert set(fk.token_dataset(file, 7)[0].keys()) == {"input_ids", "labels"}


def test_a_changed_byte_of_a_row_is_found_and_names_other_data(file, tmp_path):
    again = fk.write_tokens(tmp_path / "b", documents(), vocab_size=150, eos_id=0)
    assert again.fingerprint == file.fingerprint  # whatever the shards
    fk.data.open_tokens(file.path, verify=True)
    changed = documents()
    changed[2]["teacher_log_probs"][4, 1] -= 0.5
    other = fk.write_tokens(tmp_path / "c", changed, vocab_size=150, eos_id=0)
    assert other.fingerprint != file.fingerprint
    shard = file.path / "shard_00001.npy"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard_00001\.npy differs from its checksum"):
        fk.data.open_tokens(file.path, verify=True)


def test_a_loader_goes_on_from_a_number_and_masks_rows_at_the_end(file):
    rows = fk.token_dataset(file, 9)
    assert len(rows) == 3  # the fourth is padding, and no position counts twice
    whole = list(fk.make_loader(rows, batch_size=2, seed=3, epochs=1))
    (rest,) = fk.make_loader(rows, batch_size=2, seed=3, start=2, epochs=1)
    assert torch.equal(rest["teacher_ids"], whole[1]["teacher_ids"])
    assert (rest["teacher_ids"][1] == -100).all()
    assert not (rest["teacher_ids"][0] == -100).all()
    assert (mask_batch(whole[0])["teacher_ids"] == -100).all()


def test_padding_shifting_and_slices_take_a_row_with_its_position(file):
    batch = fk.token_dataset(file, 7).__getitems__([0, 1])
    padded = pad_positions(batch, 8)
    assert (padded["teacher_ids"][:, 7] == -100).all()
    assert padded["teacher_log_probs"].shape == (2, 8, 3)
    slices = [fk.shard_sequence(padded, rank=rank, world=2) for rank in range(2)]
    for part in slices:
        assert part["teacher_ids"].shape == (2, 4, 3)
        check_rows(part)
    joined = fk.unshard_sequence(slices)
    assert torch.equal(joined["teacher_log_probs"], padded["teacher_log_probs"])
    shifted = shift_labels(padded.exclude("labels"))
    assert torch.equal(shifted["teacher_ids"], padded["teacher_ids"][:, :-1])


def changed(number, **fields):
    every = documents()
    every[number] = {**every[number], **fields}
    return every


WRONG = {
    "another k": (
        [documents()[0], document(6, 1, k=2)],
        r"document 1: teacher_ids and teacher_log_probs must be \[1, 3\]: they are int64 \(1, 2\)",
    ),
    "no rows": ([documents()[0], [6, 7]], r"document 1: .* must be \[2, 3\]"),
    "rows all at once": ([[6, 7], documents()[0]], r"document 1: .* must be \[5, 0\]"),
    "one field": (
        [{"input_ids": [1], "teacher_ids": [[2]]}],
        r"document 0: teacher_ids and teacher_log_probs must be \[1, 'k'\]",
    ),
    "ragged": (changed(2, teacher_ids=[[1, 2, 3], [4, 5]]), r"document 2: .*inhomogeneous"),
    "other length": (changed(0, teacher_ids=[[1, 2, 3]]), r"document 0: .* \(1, 3\) and \(5, 3\)"),
    "no integers": (changed(1, teacher_ids=[[1.5, 2, 3]]), "document 1: .* float64"),
    "outside": (
        changed(1, teacher_ids=[[1, 2, 150]]),
        "document 1 has ids outside the vocabulary of 150 in the teacher's row 0",
    ),
    "negative": (changed(1, teacher_ids=[[1, -100, 2]]), "document 1 has ids outside"),
    "twice": (changed(1, teacher_ids=[[1, 2, 1]]), "document 1 has a token twice"),
    "above 1": (
        changed(3, teacher_log_probs=np.log([[0.2, 0.3, 0.4]] * 3 + [[0.5, 0.3, 0.3]])),
        "document 3 has probabilities that sum above 1 in the teacher's row 3",
    ),
    "not a number": (
        changed(1, teacher_log_probs=[[-1.0, np.nan, -2.0]]),
        "document 1 has probabilities that sum above 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_are_no_distribution_are_refused_by_name(case, tmp_path):
    given, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        fk.write_tokens(tmp_path / "a", given, vocab_size=150, eos_id=0)
    assert not (tmp_path / "a").exists()


def test_a_position_that_is_left_out_may_hold_anything(tmp_path):
    given = changed(1, teacher_ids=[[-100, 7, 7]], teacher_log_probs=[[9.0, 9.0, 9.0]])
    file = fk.write_tokens(tmp_path / "a", given, vocab_size=150, eos_id=0)
    assert fk.token_dataset(file, 8)[0]["teacher_ids"][6].tolist() == [-100, 7, 7]


def lines(every):
    return "".join(
        json.dumps({key: np.asarray(value).tolist() for key, value in each.items()}) + "\n"
        for each in every
    )


def test_prepare_keeps_ids_and_rows_and_names_the_line_of_a_fault(tmp_path):
    tokenizer = train_tokenizer(["to be or not to be"], vocab_size=260)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given = {"tokenizer": tmp_path / "tokenizer.json", "held_out_every": 3}
    source = tmp_path / "rows.jsonl"

    def prepare(every, out="out", **options):
        source.write_text(lines(every))
        records = text_documents(source, text_key="input_ids")
        return fk.data.prepare(records, tmp_path / out, **{**given, **options})

    made = prepare(documents())
    assert (made.train.documents, made.held_out.documents) == (3, 1)
    for file, numbers in ((made.train, (0, 1, 3)), (made.held_out, (2,))):
        rows = fk.token_dataset(file, 40)
        assert check_rows(rows.__getitems__([0])) == sum(LENGTHS[number] for number in numbers)
        texts = [tokenizer.decode(documents()[number]["input_ids"].tolist()) for number in numbers]
        assert file.metadata["text_bytes"] == len("".join(texts).encode())
    few = prepare(documents()[2:3], "few")  # one document: its end is held out
    assert [few.train.tokens, few.held_out.tokens] == [7, 4]
    check_rows(fk.token_dataset(few.held_out, 3)[0])
    plain = prepare([{"input_ids": each["input_ids"]} for each in documents()], "plain")
    assert plain.train.read(0, 6).tolist() == [1, 2, 3, 4, 5, 0]
    with pytest.raises(ValueError, match=r"rows\.jsonl:4: .* must be \[4, 3\].*\(4, 2\)"):
        prepare([*documents()[:3], document(16, 4, k=2)], "k")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 has ids outside the vocabulary of 260"):
        prepare(changed(1, teacher_ids=[[1, 2, 260]]), "vocabulary")
    with pytest.raises(ValueError, match=r"rows\.jsonl:4 has probabilities that sum above 1"):
        prepare(changed(3, teacher_log_probs=np.zeros((4, 3))), "above")
    with pytest.raises(ValueError, match="the documents are token ids; pass tokenizer=, theirs"):
        prepare(documents(), "none", tokenizer=None)


def message(k=2, **changes):
    rows = [{n: v[:2, :k] for n, v in document(5, 2).items() if n != "input_ids"}] * 2
    answers = {"ids": [[3, 4, 5, 6], [3, 5, 6]], "log_probs": [[-1.0] * 2] * 2}
    prompts = {"prompts": [[3, 4], [3]], "rewards": [0.0, 1.0], "teacher": rows}
    return {**prompts, **answers, **changes}


def test_rollouts_have_a_row_in_place_of_each_trained_token():
    batch = join_rollouts([message(trained=[None, [True, False]])], teacher_k=2, pad_to=4, rows=3)
    assert batch["labels"].tolist() == [[-100, 5, 6, -100], [5, -100, -100, -100], [-100] * 4]
    first = batch["teacher_ids"][..., 0].tolist()
    assert first == [[-100, 35, 36, -100], [35, -100, -100, -100], [-100] * 4]
    assert batch["teacher_ids"].shape == batch["teacher_log_probs"].shape == (3, 4, 2)
    expected = torch.from_numpy(log_probs_of([5, 6]))[:, :2].float()
    assert torch.equal(batch["teacher_log_probs"][0, 1:3], expected)
    nothing = join_rollouts([], teacher_k=2, pad_to=4)
    assert (nothing["teacher_ids"] == -100).all()
    assert nothing.keys() == batch.keys()
    together = torch.cat([batch, nothing])
    assert isinstance(together, TensorDict)
    assert together["teacher_ids"].shape == (4, 4, 2)


@pytest.mark.parametrize(
    ("k", "given", "problem"),
    [
        (3, message(), r"answer 0: .* must be \[2, 3\]: they are int64 \(2, 2\)"),
        (0, message(), r"answer 0: .* must be \[2, 0\]"),
        (2, message(teacher=[None, None]), r"answer 0: .* must be \[2, 2\]"),
        (2, message(teacher=[message()["teacher"][0]]), "2 prompts, but 1 teacher"),
    ],
)
def test_an_answer_with_other_rows_is_refused_and_a_stream_sets_it_aside(k, given, problem):
    with pytest.raises(ValueError, match=problem):
        join_rollouts([given], teacher_k=k)

    def to_batch(messages):
        return join_rollouts(messages, teacher_k=k)

    source = iter([given, message(k, **({} if k else {"teacher": [None] * 2}))])
    stream = fk.rollouts.RolloutStream(source, to_batch=to_batch)
    assert len(list(islice(stream, 2))) == 1
    assert len(stream.set_aside) == 1
