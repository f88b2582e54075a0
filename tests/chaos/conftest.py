"""Data whose rows say which they are, and runs nobody disturbs."""

from __future__ import annotations

import pytest
from chaos.scene import GLOBAL_BATCH, ROWS, SEQ_LEN, STANDARD, Life, Scene, counting_tokens
from chaos.survival import compare
from runs import arguments

assert ROWS % GLOBAL_BATCH == 0


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token file in which token ``t`` stands at place ``t``, and its held-out part."""
    path = counting_tokens(tmp_path_factory.mktemp("data") / "tokens")
    counting_tokens(path / "heldout", 5, end=ROWS * SEQ_LEN)
    return path


@pytest.fixture(scope="session")
def undisturbed(tokens, tmp_path_factory):
    """The directory of a run with these settings that nobody disturbs; made once."""
    made = {}

    def run(ranks, **settings):
        key = ranks, *sorted(settings.items())
        if key not in made:
            out = made[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            given = STANDARD | {"data__path": tokens, "out": out} | settings
            log = out.with_name("log")
            life = Life(arguments(**given), log=log, ranks=ranks)
            assert life.end() == [0] * ranks, life.output
        return made[key]

    return run


@pytest.fixture
def scene(tokens, undisturbed, tmp_path):
    """A fresh run directory; nothing that was started in it survives the test."""
    place = Scene(tmp_path / "run", tokens, undisturbed)
    yield place
    for life in place.lives:
        life.kill()


@pytest.fixture
def survived():
    """Compares the outcome of a case with its row of the documentation."""
    return compare
