"""The page on what a run survives: each row is compared by a test, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

from chaos.survival import PAGE, rows


def test_every_row_is_compared_by_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tests = tests.replace('f"rank {rank} alone"', '"rank 0 alone", "rank 1 alone"')
    assert len(rows()) > 40
    assert [name for name in rows() if f'"{name}"' not in tests] == []


def test_names_of_tests_in_the_text_exist():
    sources = "".join(path.read_text() for path in PAGE.parents[1].glob("tests/**/*.py"))
    mentioned = re.findall(r"`(test_\w+)`", PAGE.read_text())
    assert mentioned
    assert [test for test in mentioned if f"def {test}(" not in sources] == []
