"""Bins on disk are what ``pack`` gives, or they are not used."""

from __future__ import annotations

import contextlib
import pickle

import numpy as np
import pytest
import torch
from pool import run_ranks

from forgekit.data.packing import cached_bins, open_bins, pack
from forgekit.data.token_files import write_tokens

LENGTHS = [3, 6, 4, 2, 9, 1, 1]
FRESH = pack(LENGTHS, 8)


def test_bins_are_found_again_and_mapped(tmp_path):
    folder = tmp_path / "a" / "bins"
    bins = cached_bins(folder, LENGTHS, 8)
    assert bins.fingerprint == FRESH.fingerprint
    assert not bins.lengths.flags.writeable
    inode = bins.path.stat().st_ino
    again = cached_bins(folder, np.array(LENGTHS), np.int64(8), align=np.int8(1))
    assert (again.path, again.fingerprint) == (bins.path, bins.fingerprint)
    assert bins.path.stat().st_ino == inode
    assert list(folder.iterdir()) == [bins.path]
    assert [len(cached_bins(folder, [0, 0], 8)) for _ in range(2)] == [0, 0]


OTHER = [
    {"documents": [3, 6, 4, 2, 9, 1, 2]},
    {"documents": LENGTHS[::-1]},
    {"capacity": 16},
    {"method": "sequential"},
    {"align": 2},
    {"long": "drop"},
]


def test_other_arguments_are_other_bins(tmp_path):
    paths = set()
    for other in [{}, *OTHER]:
        options = {"documents": LENGTHS, "capacity": 8, **other}
        bins = cached_bins(tmp_path, **options)
        paths.add(bins.path)
        expected = pack(options.pop("documents"), **options)
        assert bins.fingerprint == expected.fingerprint
        assert bins.dropped == expected.dropped
    assert len(paths) == 7


def test_bins_of_a_token_file_follow_its_tokens_and_its_tokenizer(tmp_path):
    def path_of(documents):
        file = write_tokens(tmp_path / "a", documents, vocab_size=9, eos_id=0)
        bins = cached_bins(tmp_path / "bins", file, 8)
        assert bins.lengths.tolist() == [3, 2]
        (tmp_path / "a" / "tokenizer.json").write_text("{}")
        other = cached_bins(tmp_path / "bins", file, 8).path
        (tmp_path / "a" / "tokenizer.json").unlink()
        return bins.path, other

    first = path_of([[1, 2], [3]])
    assert path_of([[1, 2], [3]]) == first
    assert len({*first, *path_of([[1, 2], [4]])}) == 4


def test_damaged_bins_are_refused_and_made_anew(tmp_path):
    file = cached_bins(tmp_path, LENGTHS, 8).path
    whole = file.read_bytes()
    for damaged in (whole[:-8], b"PK" + whole[2:], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bins-.*.npy cannot be read \("):
            open_bins(file)
        assert cached_bins(tmp_path, LENGTHS, 8).fingerprint == FRESH.fingerprint
        assert list(tmp_path.iterdir()) == [file]


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Where one does no harm (a space of the header) the bins are still the same."""
    file = cached_bins(tmp_path, LENGTHS, 8).path
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert open_bins(file).fingerprint == FRESH.fingerprint, place


def test_bins_on_disk_are_pickled_by_their_path(tmp_path):
    bins = cached_bins(tmp_path, np.ones(5_000, dtype=np.int64), 8)
    pickled = pickle.dumps(bins)
    assert len(pickled) < 500
    assert pickle.loads(pickled).fingerprint == bins.fingerprint
    assert pickle.loads(pickle.dumps(FRESH)).fingerprint == FRESH.fingerprint


def _cache(rank, world, folder):
    lengths = np.arange(200_000) % 997 + 1
    torch.distributed.barrier()
    return cached_bins(folder, lengths, 1024).fingerprint


def test_several_processes_at_once_get_the_same_bins(tmp_path):
    expected = pack(np.arange(200_000) % 997 + 1, 1024).fingerprint
    assert run_ranks(_cache, 3, tmp_path) == [expected] * 3
    assert len(list(tmp_path.iterdir())) == 1
