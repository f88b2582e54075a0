"""The table of the documentation: every case, and nothing in it that is not promised."""

from __future__ import annotations

import re
from pathlib import Path

from chaos.scene import MOST_LOST
from chaos.survival import (
    TARGET,
    names,
)

AFTER = (
    *("bitwise the same", "bitwise that of these sizes"),
    *("within 1e-6", "nothing changed in that step"),
)


def test_the_table_has_every_case_and_loses_only_what_a_checkpoint_lacks():
    page = TARGET.read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (\w+) \| (.+?) \| (.+?) \|$", page, re.M)
    rows = [row for row in rows if row[0] != "what was done"]
    assert [name for name, *_ in rows] == names()
    for name, _, status, lost, after in rows:
        assert status in ("running", "stopped", "failed", "finished"), name
        assert lost == "0" or 0 < int(lost.removeprefix("at most ")) <= MOST_LOST, name
        assert after in AFTER, name


def test_every_case_is_reported_by_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tests = tests.replace('f"rank {rank} alone"', '"rank 0 alone", "rank 1 alone"')
    assert [name for name in names() if f'"{name}"' not in tests] == []


def test_names_of_tests_in_the_text_exist():
    sources = "".join(path.read_text() for path in TARGET.parents[1].glob("tests/**/*.py"))
    mentioned = re.findall(r"`(test_\w+)`", TARGET.read_text())
    assert mentioned
    assert [test for test in mentioned if f"def {test}(" not in sources] == []
