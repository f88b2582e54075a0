"""Stores of run directories behind URLs."""

import pytest
from buckets import open_bucket
from fsspec.implementations.memory import MemoryFileSystem

from forgekit.remote.urls import Url


@pytest.fixture(scope="module")
def bucket():
    with open_bucket() as bucket:
        yield bucket


@pytest.fixture
def memory(tmp_path):
    """A URL of a store that answers at once, and that has no conditional writes."""
    yield Url("memory://bucket") / tmp_path.name
    MemoryFileSystem.store.clear()
