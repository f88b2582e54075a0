"""Micro-batches, loaders, streams and their numbers that have to be refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

import forgekit as fk

pytestmark = pytest.mark.bad_input

IDS = torch.arange(6).reshape(2, 3)
ROWS = [TensorDict({"input_ids": torch.tensor([i]), "labels": torch.tensor([i])}) for i in range(8)]


def batch_of(**tensors):
    return TensorDict({"input_ids": IDS, "labels": IDS, **tensors}, batch_size=[2])


def loader(**options):
    return fk.make_loader(**{"dataset": ROWS, "batch_size": 2, **options})


def stream(documents=((1, 2, 3),), **options):
    return fk.data.stream_documents(documents, **{"eos_id": 0, **options})


BATCHES = {
    "one dimension too many": (
        lambda: fk.check_batch(batch_of(input_ids=IDS[..., None])),
        ValueError,
        r'^"input_ids" has shape \(2, 3, 1\); it must be \[b s\], .* forgekit\.data\.collate st',
    ),
    "complex ids": (
        lambda: fk.check_batch(batch_of(input_ids=IDS.to(torch.complex64))),
        TypeError,
        r'^"input_ids" holds torch\.complex64; it must hold integers\. Move a batch with \.to\(dev',
    ),
    "ids in a batch of their own": (
        lambda: fk.check_batch(batch_of(input_ids=batch_of())),
        ValueError,
        r'^"input_ids" has shape \(2,\); it must be \[b s\]',
    ),
    "float sources": (
        lambda: fk.check_batch(batch_of(source=torch.ones(2))),
        TypeError,
        r'^"source" holds torch\.float32; it must hold integers\. Move a batch with',
    ),
    "no batch": (
        lambda: fk.check_batch(None),
        TypeError,
        r"^batch is a NoneType; a micro-batch is a TensorDict: TensorDict\(tensors, batch_size=",
    ),
    "a shift of nothing": (
        lambda: fk.shift_labels(None),
        TypeError,
        "^batch is a NoneType; a micro-batch is a TensorDict: TensorDict",
    ),
    "a shift of one sample": (
        lambda: fk.shift_labels(TensorDict({"input_ids": IDS[0]})),
        ValueError,
        r"^batch has batch_size \[\]; a micro-batch has \[rows\]\. Build it as TensorDict",
    ),
    "a mask over a dict": (
        lambda: fk.data.mask_batch({"labels": IDS}),
        TypeError,
        "^batch is a dict; a micro-batch is a TensorDict: TensorDict",
    ),
    "samples that are None": (
        lambda: fk.data.collate(None),
        ValueError,
        "^there are no samples to collate; a micro-batch has at least one row",
    ),
    "an answer that ends as it starts": (
        lambda: fk.data.mask_prompts(batch_of(), 1, 1),
        ValueError,
        "^start and stop are both 1; an answer ends with another token",
    ),
    "samples of two dtypes": (
        lambda: fk.data.collate([{"a": IDS}, {"a": IDS.float()}]),
        ValueError,
        r'^sample 1 has "a" float32 \[2, 3\]; sample 0 has "a" int64 \[2, 3\]. All must have',
    ),
    **{
        f"padding with {name} of {value!r}": (
            partial(fk.data.pad_positions, batch_of(), **{name: value}),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("positions", "multiple", "token")
        for value in (4.0, "4")
    },
    "rows padded to a multiple of nothing": (
        lambda: fk.data.pad_positions(batch_of(), multiple=0),
        ValueError,
        "^multiple 0 must be at least 1",
    ),
    "an answer that starts with a text": (
        lambda: fk.data.mask_prompts(batch_of(), "<|assistant|>"),
        TypeError,
        "^start is '<.assistant.>', a str; pass an integer",
    ),
    "an answer that starts below zero": (
        lambda: fk.data.mask_prompts(batch_of(), -1),
        ValueError,
        "^start -1 must be at least 0",
    ),
    "an answer that ends with a truth": (
        lambda: fk.data.mask_prompts(batch_of(), 1, True),
        TypeError,
        "^stop is True, a bool; pass an integer",
    ),
    "rows padded to nothing": (
        lambda: fk.data.pad_positions(batch_of(), 0),
        ValueError,
        "^a row has 3 positions, more than 0; truncate or drop long rows, or pack documents: forge",
    ),
}
LOADING = {
    "a world of nobody": (
        lambda: loader(world=0),
        ValueError,
        r"^rank 0 must lie in range\(world=0\)\. rank, world = forgekit\.data_ranks\(mesh\) gives",
    ),
    "a negative rank": (
        lambda: loader(rank=-1),
        ValueError,
        r"^rank -1 must lie in range\(world=1\)\. rank, world = forgekit\.data_ranks\(mesh\) gives",
    ),
    "a skip before the start": (
        lambda: loader(skip=[(-1, 2)]),
        ValueError,
        r"^skip has \(-1, 2\); each entry is \(first sample, rows\), neither negative, as in state",
    ),
    "no data set": (
        lambda: loader(dataset=None),
        TypeError,
        "^the dataset is a NoneType without a length; a loader reads rows by number. Pass an endle",
    ),
    "a negative number of workers with processes": (
        lambda: loader(workers=-2, processes=True),
        ValueError,
        "^workers -2 must be at least 0",
    ),
    **{
        f"{name} of {value}": (
            partial(loader, **{name: value}),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name, value in (("batch_size", 2.5), ("start", 0.5), ("epochs", 1.5), ("workers", "2"))
    },
    **{
        f"{name} of {value!r}": (
            partial(loader, **{name: value}),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("batch_size", "seed", "start", "rank", "world", "workers", "epochs", "ahead")
        for value in (True, "1", 1.0)
    },
    **{
        f"{name} beyond int64": (
            partial(loader, **{name: 10**30}),
            ValueError,
            rf"^{name} {10**30} must be at most ",
        )
        for name in ("batch_size", "seed", "start", "workers", "epochs", "ahead")
    },
    "rows for which there is no memory": (
        lambda: loader(batch_size=2**40),
        ValueError,
        "^batch_size 1099511627776 must be at most 2,147,483,648",
    ),
    "a million workers": (
        lambda: loader(workers=10**6),
        ValueError,
        "^workers 1000000 must be at most 1,024",
    ),
    "a rank of the next world": (
        lambda: loader(rank=4, world=4),
        ValueError,
        r"^rank 4 must lie in range\(world=4\)\. rank, world = forgekit\.data_ranks\(mesh\) gives",
    ),
    "a global batch of text": (
        lambda: loader().micro_batches("8"),
        TypeError,
        "^global_batch_size is '8', a str; pass an integer",
    ),
    "a place of a fraction": (
        lambda: loader().seek(1.5),
        TypeError,
        "^start is 1.5, a float; pass an integer",
    ),
    "groups of a truth": (
        lambda: fk.groups(ROWS, True),
        TypeError,
        r"^micro_batches is True, a bool; pass an integer\.$",
    ),
    "groups of a fraction": (
        lambda: fk.groups(ROWS, 1.5),
        TypeError,
        r"^micro_batches is 1.5, a float; pass an integer\.$",
    ),
    "a negative global batch": (
        lambda: loader().micro_batches(-4),
        ValueError,
        r"^global_batch_size -4 must be divisible by .*; the nearest is 2\.$",
    ),
    "no global batch": (
        lambda: loader().micro_batches(0),
        ValueError,
        r"^global_batch_size 0 must be divisible by batch_size 2 \* 1 .*; the nearest is 2\.$",
    ),
    "a global batch of half a micro-batch": (
        lambda: loader(world=4).micro_batches(12),
        ValueError,
        r"^global_batch_size 12 must be .* = 8; the nearest are 8 and 16, or batch_size 1\.$",
    ),
    "a place before the start": (
        lambda: loader().seek(-1),
        ValueError,
        "^start -1 must be at least 0",
    ),
    "a negative group": (
        lambda: fk.groups(ROWS, -1),
        ValueError,
        "^micro_batches -1 must be at least 1",
    ),
    "no policy": (
        lambda: fk.run.DataEnd(None),
        ValueError,
        "^policy is None; it is one of .pad., .drop., .error",
    ),
}
STREAMS = {
    "a world of nobody": (
        lambda: stream(world=0),
        ValueError,
        r"^rank 0 must lie in range\(world=0\)\. .* forgekit\.data_ranks\(mesh\) gives both",
    ),
    "a negative rank": (
        lambda: stream(rank=-1),
        ValueError,
        r"^rank -1 must lie in range\(world=1\)\. .* forgekit\.data_ranks\(mesh\) gives both",
    ),
    "negative positions": (
        lambda: stream(seq_len=-4),
        ValueError,
        "^seq_len -4 must be at least 1",
    ),
    "a negative batch": (
        lambda: stream(batch_size=-1),
        ValueError,
        "^batch_size -1 must be at least 1",
    ),
    "negative epochs": (
        lambda: stream(epochs=-1),
        ValueError,
        "^epochs -1 must be at least 1",
    ),
    "negative workers": (
        lambda: stream(workers=-1),
        ValueError,
        r"^workers -1 must be at least 0\.$",
    ),
    "a negative end": (
        lambda: stream(eos_id=-1),
        ValueError,
        "^eos_id -1 must be at least 0",
    ),
    "an end between two ids": (
        lambda: stream(eos_id=1.5),
        TypeError,
        "^eos_id is 1.5, a float; pass an integer",
    ),
    **{
        f"{name} of {value!r}": (
            partial(stream, **{name: value}),
            TypeError,
            rf"^{name} is {value!r}, a {type(value).__name__}; pass an integer\.$",
        )
        for name in ("seq_len", "batch_size", "epochs", "rank", "world", "workers")
        for value in (True, "1", 1.0)
    },
    **{
        f"an end of {value!r}": (
            partial(stream, eos_id=value),
            TypeError,
            rf"^eos_id is {value!r}, a {type(value).__name__}; pass an integer",
        )
        for value in (True, "0")
    },
    "an end that no token file holds": (
        lambda: stream(eos_id=2**32),
        ValueError,
        "^eos_id 4294967296 must be at most 4,294,967,295",
    ),
    "rows without end": (
        lambda: stream(seq_len=2**40),
        ValueError,
        "^seq_len 1099511627776 must be at most 2,147,483,648",
    ),
    "a tokenizer that is a name": (
        lambda: stream(["to be"], tokenizer="gpt2"),
        TypeError,
        r"^tokenizer is 'gpt2', a str; pass what forgekit\.data\.load_tokenizer\(path\) returns, ",
    ),
    "no documents": (
        lambda: stream(None),
        TypeError,
        r"^documents is a NoneType; it must be a source, such as forgekit\.data\.text_documents",
    ),
    "an empty list": (
        lambda: next(iter(stream([]))),
        ValueError,
        r"^reader 0 of 1 found no document \(0 are broken\)\. Stream at least as many documents",
    ),
    "a dict of documents": (
        lambda: next(iter(stream({"a": [1]}))),
        TypeError,
        "^these documents are text, so the stream needs a tokenizer; pass it so",
    ),
}
TABLES = {"batch": BATCHES, "loader": LOADING, "stream": STREAMS}
CASES = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_a_batch_or_loaded_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
