"""Micro-batches, loaders, streams and their numbers that have to be refused."""

from __future__ import annotations

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
    "no batch": (
        lambda: fk.check_batch(None),
        TypeError,
        r"^batch is a NoneType; a micro-batch is a TensorDict: TensorDict\(tensors, batch_size=",
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
    "a rank of the next world": (
        lambda: loader(rank=4, world=4),
        ValueError,
        r"^rank 4 must lie in range\(world=4\)\. rank, world = forgekit\.data_ranks\(mesh\) gives",
    ),
    "a global batch of half a micro-batch": (
        lambda: loader(world=4).micro_batches(12),
        ValueError,
        r"^global_batch_size 12 must be .* = 8; the nearest are 8 and 16, or batch_size 1\.$",
    ),
}
STREAMS = {
    "a world of nobody": (
        lambda: stream(world=0),
        ValueError,
        r"^rank 0 must lie in range\(world=0\)\. .* forgekit\.data_ranks\(mesh\) gives both",
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
}
TABLES = {"batch": BATCHES, "loader": LOADING, "stream": STREAMS}
CASES = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_a_batch_or_loaded_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
