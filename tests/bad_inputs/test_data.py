"""Documents, bins, mixtures and token files that have to be refused."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

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
    "truth values": ([[True]], rf"^document 0 is bool of shape \(1,\); {A_DOCUMENT}"),
    "nothing": ([[1], None], rf"^document 1 is object of shape \(\); {A_DOCUMENT}"),
    "one text": ("abc", rf"^document 0 is <U1 of shape \(\); {A_DOCUMENT}"),
    "a text": (["ab"], rf"^document 0 is <U2 of shape \(\); {A_DOCUMENT}"),
    "bytes": ([b"ab"], rf"^document 0 is \|S2 of shape \(\); {A_DOCUMENT}"),
    "floats of torch": ([torch.ones(2)], rf"^document 0 is float32 of shape \(2,\); {A_DOCUMENT}"),
    "a matrix": ([np.ones((2, 2), int)], rf"^document 0 is int64 of shape \(2, 2\); {A_DOCUMENT}"),
    "a dict": ([{"ids": [1]}], rf"^document 0 is object of shape \(\); {A_DOCUMENT}"),
    "not a number": ([[math.nan]], rf"^document 0 is float64 of shape \(1,\); {A_DOCUMENT}"),
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
    "no vocabulary": ({"vocab_size": 0}, r"^vocab_size 0 must be at least 1\.$"),
    "a negative vocabulary": ({"vocab_size": -7}, r"^vocab_size -7 must be at least 1\.$"),
    "a negative end": ({"eos_id": -1}, r"^eos_id -1 must be at least 0\."),
    "an end beyond the vocabulary": ({"eos_id": 100}, r"^eos_id 100 must be at most 99\."),
    "a vocabulary of a trillion": (
        {"vocab_size": 10**12},
        r"^vocab_size 1000000000000 must be at most 4,294,967,296\.$",
    ),
    **{
        f"{name} beyond int64": ({name: 2**63}, rf"^{name} {2**63} must be at most {most}\.$")
        for name, most in (
            ("vocab_size", "4,294,967,296"),
            ("eos_id", "99"),
            ("shard_tokens", r"2\*\*63 - 1"),
        )
    },
    "negative shards": ({"shard_tokens": -1}, "^shard_tokens -1 must be at least 1"),
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


def escaped(value):
    return re.escape(repr(value))


DAMAGE = {
    **{
        f"{name} {value!r}": (
            {name: value},
            rf'index\.json( has {escaped(value)} as "{name}"; it|: {name} {escaped(value)}) must ',
        )
        for name, values in {
            "vocab_size": (None, "9", True, 9.5, 0, -1, 10**30),
            "eos_id": (None, "0", True, -1, 10**30),
            "tokens": (None, "7", 7.5, 0, -7, 10**30),
            "documents": (None, "2", 2.5, 0, -2, 10**30),
            "shards": (None, 7, {}, [7.0], ["7"], [None], [True], [-7], [0, 7], [[7]]),
            "fingerprint": (None, 7, []),
            "metadata": (None, [], "a"),
            "checksums": ([], 3, "a"),
            "dtype": (None, 2, ["uint16"]),
        }.items()
        for value in values
    },
    "an end beyond the vocabulary": ({"eos_id": 100}, "eos_id 100 is not among the 100 ids. Write"),
    "another kind of number": ({"dtype": "int8"}, ": dtype 'int8' must be uint16 or uint32"),
    "a byte order": ({"dtype": ">u2"}, ": dtype '>u2' must be uint16 or uint32. Write"),
    "more tokens": ({"tokens": 8}, ": 8 tokens and shards of 7 in all cannot both be right. Write"),
    "more documents": ({"documents": 3}, r"offsets\.bin is 56 bytes; expected .* It is truncated"),
    "more of both": ({"tokens": 9, "shards": [9]}, r"shard_00000\.bin is 46 bytes; expected"),
    "no magic": ({"magic": None}, "has magic None, not "),
    "magic of escapes": ({"magic": "\x1b[2J"}, r"has magic '.x1b\[2J', not "),
    "no version": ({"version": None}, "has version None, not 1"),
    "a version of text": ({"version": "1"}, "has version '1', not 1"),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGE.values(), ids=DAMAGE)
def test_an_index_that_is_damaged_in_any_field_is_refused(tmp_path, changes, message):
    file = write(tmp_path).path / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        fk.data.open_tokens(tmp_path / "a")


INDEX = {
    "a list": (b"[]", r"has magic \[\], not "),
    "nothing": (b"", r"is not JSON \(Expecting value.*\)\. Write the token file again"),
    "3,000 lists": (b"[" * 3000, r"is not JSON \(brackets are nested too deeply\)\. Write"),
    "5,000 digits": (
        b'{"tokens": ' + b"9" * 5000,
        r"\(an integer has more than 4,300 digits\)\. W",
    ),
    "bytes": (b"\xff\xfe", r"is not JSON \('utf-8' codec can't decode byte 0xff.*\)\. Write"),
    "a key given twice": (b'{"a": 1, "a": 2}', r'\(the key "a" stands twice in one object\)\. Wr'),
}


@pytest.mark.parametrize(("content", "message"), INDEX.values(), ids=INDEX)
def test_an_index_that_is_no_json_is_refused(tmp_path, content, message):
    (write(tmp_path).path / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        fk.data.open_tokens(tmp_path / "a")


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
    "rows of nothing there": (
        lambda folder: fk.token_dataset(folder / "gone"),
        FileNotFoundError,
        rf"gone {NOT_TOKENS}",
    ),
    "documents of nothing there": (
        lambda folder: fk.data.token_documents(folder / "gone"),
        FileNotFoundError,
        rf"gone {NOT_TOKENS}",
    ),
    "packed rows of nothing there": (
        lambda folder: fk.packed_dataset(folder / "gone", bins()),
        FileNotFoundError,
        rf"gone {NOT_TOKENS}",
    ),
    "tokens before the first": (
        lambda folder: write(folder).read(-1, 2),
        IndexError,
        "^tokens -1:2 must lie within 0:7 of",
    ),
    "tokens that end before they start": (
        lambda folder: write(folder).read(3, 2),
        IndexError,
        "^tokens 3:2 must lie within 0:7 of",
    ),
    "rows of a fraction": (
        lambda folder: fk.token_dataset(write(folder), seq_len=2.5),
        TypeError,
        "^seq_len is 2.5, a float; pass an integer",
    ),
    "rows of negative length": (
        lambda folder: fk.token_dataset(write(folder), seq_len=-3),
        ValueError,
        "^seq_len -3 must be at least 1",
    ),
    **{
        f"rows of {value!r}": (
            lambda folder, value=value: fk.token_dataset(write(folder), seq_len=value),
            TypeError,
            rf"^seq_len is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for value in (True, "3", None)
    },
    "rows for which there is no memory": (
        lambda folder: fk.token_dataset(write(folder), seq_len=2**40),
        ValueError,
        "^seq_len 1099511627776 must be at most 2,147,483,648",
    ),
    "a model that knows nothing": (
        lambda folder: fk.check_vocabulary(fk.token_dataset(write(folder), 3), 0),
        ValueError,
        "^vocab_size 0 must be at least 1",
    ),
    "a model that knows a text": (
        lambda folder: fk.check_vocabulary(fk.token_dataset(write(folder), 3), "100"),
        TypeError,
        "^vocab_size is '100', a str; pass an integer",
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
    **{
        f"packing with {name} of {value!r}": (
            lambda name=name, value=value: fk.pack([3], **{"capacity": 8, name: value}),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("capacity", "align")
        for value in (8.0, "8", True, None)
    },
    "no capacity": (lambda: fk.pack([3], 0), ValueError, "^capacity 0 must be at least 1"),
    **{
        f"random documents with {name} of {value!r}": (
            lambda name=name, value=value: fk.data.random_documents(
                **{"vocab_size": 9, "count": 2, name: value}
            ),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("vocab_size", "count", "longest", "shortest", "seed")
        for value in (2.5, "2", True)
    },
    "a tokenizer of a fraction": (
        lambda: fk.data.train_tokenizer(["to be"], 300.5),
        TypeError,
        "^vocab_size is 300.5, a float; pass an integer",
    ),
    "a tokenizer of a trillion": (
        lambda: fk.data.train_tokenizer(["to be"], 10**12),
        ValueError,
        "^vocab_size 1000000000000 must be at most 4,194,304",
    ),
    "a text that is a number": (
        lambda: fk.data.train_tokenizer(["to be", 3], 300),
        TypeError,
        "^text 1 is 3, a int; pass an iterable of texts",
    ),
    "a text that is missing": (
        lambda: fk.data.train_tokenizer([None], 300),
        TypeError,
        "^text 0 is None, a NoneType; pass an iterable of texts",
    ),
    "a key that is a number": (
        lambda: fk.data.text_documents(__file__, text_key=3),
        TypeError,
        "^text_key is 3, a int; pass text",
    ),
    "a way of errors that is none": (
        lambda: fk.data.text_documents(__file__, errors="ignore"),
        ValueError,
        """^errors is 'ignore'; it is one of "raise", "skip".""",
    ),
    "paths in a dict of numbers": (
        lambda: fk.data.text_documents({3: "a"}),
        TypeError,
        "^a path is 3, a int; pass a path",
    ),
    **{
        f"a Hugging Face dataset that is {value!r}": (
            lambda value=value: fk.data.huggingface_documents(value),
            TypeError,
            rf"^dataset is {re.escape(repr(value))}, a {type(value).__name__}; pass a Dataset",
        )
        for value in (3, None, ["a"], b"a")
    },
    "a split that is none": (
        lambda: fk.data.huggingface_documents("gone", split=None),
        TypeError,
        "^split is None, a NoneType; pass text",
    ),
    "no permutation": (
        lambda: fk.data.permute(0, -5, 1),
        ValueError,
        "^n -5 must be positive: there is no permutation of nothing",
    ),
    "lengths of nothing": (
        lambda: fk.pack(None, 8),
        ValueError,
        r"^lengths must be integers \[documents\], not object of shape \(\)\. np\.diff\(open",
    ),
    "lengths that are true": (
        lambda: fk.pack([True, False], 8),
        ValueError,
        r"^lengths must be integers \[documents\], not bool of shape \(2,\)\. np\.diff\(open",
    ),
    "lengths that are not numbers": (
        lambda: fk.pack([math.nan], 8),
        ValueError,
        r"^lengths must be integers \[documents\], not float64 of shape \(1,\)\. np\.diff",
    ),
    "a negative capacity": (lambda: fk.pack([3], -8), ValueError, "^capacity -8 must be at least"),
    "a negative alignment": (lambda: fk.pack([3], 8, align=-2), ValueError, "^align -2 must be at"),
    "groups that are fractions": (
        lambda: fk.pack([3, 4], 8, group=[0.5, 1.0]),
        ValueError,
        r"^group must be integers \[documents\] = \[2\], one for each length, not float64 of sh",
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
    "packed truth values": (
        lambda: fk.packed_dataset([[True]], bins()),
        ValueError,
        r"^document 0 is bool of shape \(1,\); .* integers\. .* encode text with a tokenizer",
    ),
    "packed matrices": (
        lambda: fk.packed_dataset([[[1]]], bins()),
        ValueError,
        r"^document 0 is int64 of shape \(1, 1\); .* integers\. .* encode text with a tokenizer",
    ),
    "packed ids below zero": (
        lambda: fk.packed_dataset([[-1, 2]], bins()),
        ValueError,
        "^document 0 holds token id -1; ids must be 0 to .* mask a loss in labels, not in ids",
    ),
    "packed ids that wrap": (
        lambda: fk.packed_dataset([np.array([2**63], np.uint64)], bins()),
        ValueError,
        "^document 0 holds token id 9223372036854775808; ids must be 0 to .* = 4294967295",
    ),
    "one text for many": (
        lambda: fk.data.train_tokenizer("to be", 300),
        TypeError,
        r"^texts is one str, read letter by letter; pass an iterable of texts: \[text\]",
    ),
    "an empty path": (
        lambda: fk.data.text_documents(""),
        ValueError,
        '^a path is empty; name a file or folder. "." is the current folder',
    ),
    "no rank for a sequence": (
        lambda: fk.shard_sequence({"input_ids": torch.ones(1, 2)}, rank=0, world=0),
        ValueError,
        r"^rank 0 must lie in range\(world=0\)",
    ),
    "bins of no documents": (
        lambda: fk.packed_dataset([], bins()),
        ValueError,
        "^the bins name document 0; there are 0 documents. The bins were made for others: pack th",
    ),
    "a negative vocabulary": (
        lambda: fk.data.random_documents(-9, 2),
        ValueError,
        r"^vocab_size -9 must be at least 1\.$",
    ),
    "a source of a negative number of rows": (
        lambda: order({"a": -5}),
        ValueError,
        r"^sizes\['a'\] -5 must be at least 1",
    ),
    "no sources": (
        lambda: order(()),
        ValueError,
        r'^sizes are empty; name each source and its rows: \{"code": 1000\}',
    ),
    "a negative temperature": (
        lambda: order(temperature=-1.0),
        ValueError,
        r"^temperature -1\.0 must be above 0; 1\.0 leaves the weights as they are",
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
