"""Documents, bins, mixtures and token files that have to be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

import forgekit as fk

pytestmark = pytest.mark.bad_input

A_DOCUMENT = r"a document is a 1-D array of integers\. Pass an iterable of such arrays; encode text"


def write(folder, documents=((1, 2, 3), (4, 5)), **options):
    return fk.write_tokens(folder / "a", documents, **{"vocab_size": 100, "eos_id": 0, **options})


def bins():
    return fk.pack([1], 8)


def order(sizes=None, **options):
    return fk.make_order({"a": 5, "b": 5} if sizes is None else sizes, **options)


WRITTEN = {
    "nothing": ([[1], None], rf"^document 1 is object of shape \(\); {A_DOCUMENT}"),
    "a text": (["ab"], rf"^document 0 is <U2 of shape \(\); {A_DOCUMENT}"),
    "an id that wraps": (
        [np.array([2**64 - 1], np.uint64)],
        r"^document 0 holds token id 18446744073709551615; ids must be 0 .* = 99",
    ),
}


@pytest.mark.parametrize(("documents", "message"), WRITTEN.values(), ids=WRITTEN)
def test_documents_that_cannot_be_written_are_refused_and_leave_nothing(
    tmp_path, documents, message
):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, documents)
    assert not list(tmp_path.iterdir())


NUMBERS = {
    "an end beyond the vocabulary": ({"eos_id": 100}, r"^eos_id 100 must be at most 99\."),
}


@pytest.mark.parametrize(("options", "message"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_no_token_file_has_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, **options)
    assert not list(tmp_path.iterdir())


KINDS = {
    f"{name} {value!r}": (name, value)
    for name in ("vocab_size", "eos_id", "shard_tokens")
    for value in (7.0, "7", True, None)
}


@pytest.mark.parametrize(("name", "value"), KINDS.values(), ids=KINDS)
def test_numbers_of_a_token_file_are_integers(tmp_path, name, value):
    message = rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$"
    with pytest.raises(TypeError, match=message):
        write(tmp_path, **{name: value})
    assert not list(tmp_path.iterdir())


NOT_TOKENS = r"is not a token file: it has no index\.json\. forgekit\.write_tokens and `forgekit pr"
READ = {
    "a folder that is not there": (
        lambda folder: fk.data.open_tokens(folder / "gone"),
        FileNotFoundError,
        rf"gone {NOT_TOKENS}",
    ),
    "a file": (
        lambda folder: fk.data.open_tokens(__file__),
        FileNotFoundError,
        rf"py {NOT_TOKENS}",
    ),
    "tokens before the first": (
        lambda folder: write(folder).read(-1, 2),
        IndexError,
        "^tokens -1:2 must lie within 0:7 of",
    ),
    "a model that knows too few": (
        lambda folder: fk.check_vocabulary(fk.token_dataset(write(folder), 3), 99),
        ValueError,
        r"^vocab_size 99 of the model is below the 100 of .*; set model\.vocab_size=100 or more",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), READ.values(), ids=READ)
def test_what_is_no_token_file_or_outside_of_it_is_refused(tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(tmp_path)


ARRAYS = {
    "no capacity": (lambda: fk.pack([3], 0), ValueError, "^capacity 0 must be at least 1"),
    "lengths of nothing": (
        lambda: fk.pack(None, 8),
        ValueError,
        r"^lengths must be integers \[documents\], not object of shape \(\)\. np\.diff\(open",
    ),
    "bins that end elsewhere": (
        lambda: fk.data.Bins([0, 5], [0], [0], [1]),
        ValueError,
        r"^the offsets of bins go from \[0\] to \[5\]; they must go from 0 to the number of piece",
    ),
    "packed fractions": (
        lambda: fk.packed_dataset([[1.5]], bins()),
        ValueError,
        r"^document 0 is float64 of shape \(1,\); .* integers\. .* encode text with a tokenizer",
    ),
    "packed ids below zero": (
        lambda: fk.packed_dataset([[-1, 2]], bins()),
        ValueError,
        "^document 0 holds token id -1; ids must be 0 to .* mask a loss in labels, not in ids",
    ),
    "one text for many": (
        lambda: fk.data.train_tokenizer("to be", 300),
        TypeError,
        r"^texts is one str, read letter by letter; pass an iterable of texts: \[text\]",
    ),
    "bins of no documents": (
        lambda: fk.packed_dataset([], bins()),
        ValueError,
        "^the bins name 1 tokens from token 0 of document 0, and of the 0 documents none has",
    ),
    "no sources": (
        lambda: order(()),
        ValueError,
        r'^sizes are empty; name each source and its rows: \{"code": 1000\}',
    ),
    "a phase's negative weight": (
        lambda: order(phases=[fk.Phase(3, {"a": -1})]),
        ValueError,
        r"^the phase at sample 3: weights\['a'\] is -1; it must be finite and not negative",
    ),
    "a phase's infinite scale": (
        lambda: fk.Phase(3, lr_scale=math.inf),
        ValueError,
        "^lr_scale is inf; it must be finite and not negative",
    ),
    "phases that go back": (
        lambda: order(phases=[fk.Phase(9), fk.Phase(3)]),
        ValueError,
        "^a phase at sample 3 follows one at sample 9; put phases in increasing order",
    ),
    "a mixture of nothing": (
        lambda: fk.mixture_dataset({}, order()),
        ValueError,
        'the sources of the order "a", "b"; make the order from the lengths of these datasets',
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ARRAYS.values(), ids=ARRAYS)
def test_documents_bins_and_mixtures_that_cannot_be_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
