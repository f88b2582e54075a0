"""Sampling against a plain loop, hand-made chains and the frequencies of a known distribution."""

from __future__ import annotations

import attrs
import pytest
import torch
from oracle import SPEC, build_state
from ranks import run_again
from torch import nn

import forgekit as fk

PROMPT = torch.tensor([[1, 2, 3], [7, 5, 9]])


def sharp(model):
    """Make the next token differ from row to row: fresh weights are nearly indifferent."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    return model


def transformer(**changes):
    return sharp(fk.Transformer(attrs.evolve(SPEC, **changes)))


def greedy(model, ids, count):
    for _ in range(count):
        logits = model(ids[:, -SPEC.max_seq_len :])[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


class Chain(nn.Module):
    """The next token is the last one plus one, modulo 10; the logits do not leave a doubt."""

    def forward(self, ids):
        return 100.0 * nn.functional.one_hot((ids + 1) % 10, 10)


class Fixed(nn.Module):
    """The same distribution everywhere."""

    def __init__(self, *probabilities):
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


@pytest.mark.parametrize("count", [0, 1, 12, 20])
def test_greedy_takes_the_most_likely_token(count):
    """Also beyond max_seq_len, where the last tokens are fed."""
    model = transformer()
    found = fk.generate(model, PROMPT, max_new_tokens=count, temperature=0)
    assert found.shape == (2, 3 + count)
    assert torch.equal(found, greedy(model, PROMPT, count))
    if count == 20:
        assert len(set(found[0].tolist())) > 3


def test_a_prompt_may_be_longer_than_max_seq_len():
    model = transformer()
    prompt = torch.arange(30)[None] % SPEC.vocab_size
    found = fk.generate(model, prompt, max_new_tokens=4, temperature=0)
    assert torch.equal(found, greedy(model, prompt, 4))


def test_the_only_candidate_is_the_most_likely_token():
    model = transformer()
    found = fk.generate(model, PROMPT, max_new_tokens=10, top_k=1, temperature=5.0)
    assert torch.equal(found, greedy(model, PROMPT, 10))


def test_samples_depend_on_the_seed_alone():
    model = transformer(dropout=0.3)
    found = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        found.append(fk.generate(model, PROMPT, max_new_tokens=12, temperature=3.0, seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
        assert model.training
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
        ({"top_k": 3}, [0.5, 0.3, 0.2]),
        ({"top_k": 99}, [0.5, 0.3, 0.2]),
        ({"temperature": 2.0, "top_k": 2}, [0.5**0.5, 0.3**0.5, 0.0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_likely(options, expected):
    rows = 20_000
    model = Fixed(0.5, 0.3, 0.2)
    drawn = fk.generate(model, torch.zeros(rows, 1).long(), max_new_tokens=1, **options)[:, 1]
    shares = torch.bincount(drawn, minlength=3) / rows
    for share, wanted in zip(shares.tolist(), expected, strict=True):
        assert share == pytest.approx(wanted / sum(expected), abs=0.015)
        assert (share == 0) == (wanted == 0)


def test_rows_end_at_eos_and_are_filled_up_with_it():
    prompt = torch.tensor([[2], [4], [3]])
    found = fk.generate(Chain(), prompt, max_new_tokens=20, temperature=0, eos_id=5)
    assert found.tolist() == [[2, 3, 4, 5], [4, 5, 5, 5], [3, 4, 5, 5]]


def test_an_eos_in_the_prompt_does_not_end_it():
    found = fk.generate(Chain(), torch.tensor([[5]]), max_new_tokens=3, temperature=0, eos_id=5)
    assert found.tolist() == [[5, 6, 7, 8]]


def test_without_eos_all_tokens_are_made():
    found = fk.generate(Chain(), torch.tensor([[7]]), max_new_tokens=5, temperature=0)
    assert found.tolist() == [[7, 8, 9, 0, 1, 2]]


def test_a_model_that_raises_is_back_in_training():
    model = transformer()
    with pytest.raises(IndexError, match="out of range"):
        fk.generate(model, torch.tensor([[SPEC.vocab_size]]))
    assert model.training


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (
            torch.zeros(2, 0).long(),
            {},
            r"^input_ids has shape \(2, 0\); it must be \[b s\], s >= 1",
        ),
        (torch.zeros(3).long(), {}, r"^input_ids has shape \(3,\); it must be \[b s\]"),
        (PROMPT, {"temperature": -0.5}, r"^temperature -0.5 must not be negative"),
        (PROMPT, {"top_k": 0}, r"top_k 0 at least 1\.$"),
    ],
)
def test_arguments_out_of_range_are_refused(ids, options, message):
    with pytest.raises(ValueError, match=message):
        fk.generate(transformer(), ids, **options)


def _on_ranks(rank, world):
    model = build_state({}, world).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12)
    found = fk.generate(model, PROMPT, max_new_tokens=16, temperature=2.0, seed=4)
    return found, all(hasattr(p, "placements") for p in model.parameters())


def test_ranks_make_the_tokens_of_one_process():
    expected = fk.generate(transformer(), PROMPT, max_new_tokens=16, temperature=2.0, seed=4)
    for found, resharded in run_again(_on_ranks, 2):
        assert torch.equal(found, expected)
        assert resharded


class Letters:
    """A tokenizer with one token a letter."""

    def encode(self, text):
        encoding = type("Encoding", (), {})()
        encoding.ids = [ord(letter) - ord("a") for letter in text]
        return encoding

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sample_is_kept_under_its_step_by_the_first_rank(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(Chain(), nn.Linear(10, 10, bias=False))
    nn.init.eye_(model[1].weight)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    state = attrs.evolve(state, step=120)
    text = fk.run.write_sample(state, tmp_path, Letters(), "cd", temperature=0, max_new_tokens=3)
    assert text == "cdefg"
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in files] == (["samples/step_00000120.txt"] if rank == 0 else [])
    if files:
        assert (tmp_path / files[0]).read_text() == "cdefg"


def _laid_out(rank, world, sizes, count):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=1, **sizes), device="cpu")
    model = fk.parallelize(transformer(vocab_size=40, layers=4), mesh)
    if "pp" in sizes:
        with pytest.raises(ValueError, match=r"split into pipeline stages.*layout with pp=1"):
            fk.generate(model, PROMPT, max_new_tokens=1)
        return None
    return fk.generate(model, PROMPT, max_new_tokens=count, temperature=0)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_every_rank_of_a_layout_continues_alike_whatever_the_length(sizes):
    """Three places are no multiple of two ranks; later ones go beyond max_seq_len."""
    expected = greedy(transformer(vocab_size=40, layers=4), PROMPT, 15)
    for found in run_again(_laid_out, 2, sizes, 15):
        assert found is None or torch.equal(found, expected)
