"""The page on what a run survives: each row is compared by a test."""

from __future__ import annotations

from pathlib import Path

from chaos.survival import rows


def test_every_row_is_compared_by_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tests = tests.replace('f"rank {rank} alone"', '"rank 0 alone", "rank 1 alone"')
    assert len(rows()) > 25
    assert [name for name in rows() if f'"{name}"' not in tests] == []
