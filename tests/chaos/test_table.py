"""The table of the documentation: every case, and nothing in it that is not promised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest
from chaos.scene import MOST_LOST
from chaos.survival import (
    CASES,
    PROPERTY,
    TARGET,
    Outcome,
    names,
    read_report,
    replace_table,
    table,
)

AFTER = (
    *("bitwise the same", "bitwise that of these sizes"),
    *("within 1e-6", "nothing changed in that step"),
)
OUTCOME = Outcome(ended="exit 0", status="stopped", lost=3)


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


def test_a_case_that_is_missing_or_unknown_is_named():
    outcomes = dict.fromkeys(names(), OUTCOME)
    assert table(outcomes).count("at most 3") == len(names())
    with pytest.raises(ValueError, match=r"these differ: \['rank 0 alone', 'the moon'\]\. Run"):
        table({name: OUTCOME for name in names() if name != "rank 0 alone"} | {"the moon": OUTCOME})


def test_only_what_passed_is_read_from_a_report():
    value = {name: json.dumps([name, attrs.asdict(OUTCOME)]) for name in names()[:2]}
    case = "<testcase><properties><property name={!r} value='{}'/></properties>{}</testcase>"
    good, bad = (value[name] for name in names()[:2])
    report = case.format(PROPERTY, good, "") + case.format(PROPERTY, bad, "<failure/>")
    assert read_report(f"<testsuite>{report}</testsuite>") == {names()[0]: OUTCOME}


def test_the_rest_of_the_page_stays():
    page = TARGET.read_text()
    first = next(iter(CASES))
    assert replace_table(page, page[page.index(f"## {first}") : page.index("\n<!-- up")]) == page
    assert replace_table(replace_table(page, "x"), "y") == replace_table(page, "y")
