"""A mesh of one process."""

from __future__ import annotations

import pytest

import forgekit as fk


@pytest.fixture
def mesh():
    yield fk.build_mesh(device="cpu")
    fk.shutdown()
