"""What each case of the suite has to say, and the table that it makes.

A case leaves its outcome in the report of pytest; ``make chaos`` runs all of them and then this
file, which writes ``docs/survival.md`` anew from the report: ``python tests/chaos/survival.py
REPORT``. Nothing in the table changes from run to run: of what varies, such as the steps that a
kill costs, it has the bound that was checked.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

TARGET = Path(__file__).parents[2] / "docs" / "survival.md"
PROPERTY = "survived"
BEGIN, END = "<!-- from here on written by make chaos -->", "<!-- up to here -->"
HEAD = """\
| what was done | how the run ended | `status.json` | steps lost | loss after resuming |
|---|---|---|---|---|
"""
BITWISE, CLOSE = "bitwise the same", "within 1e-6"


@attrs.frozen(kw_only=True)
class Outcome:
    """How a run survived what was done to it.

    Attributes:
        ended: Exit codes or signals of its ranks.
        status: What ``status.json`` said.
        lost: The most steps that had to be done again.
        after: How the losses of the resumed run compare with those of an undisturbed one.
    """

    ended: str
    status: str
    lost: int
    after: str = BITWISE


CASES = {
    "Killed": [
        "all ranks, at 100 random moments one after the other",
        "rank 0 alone",
        "rank 1 alone",
        "rank 1 alone, under torchrun",
        "while the shards of a checkpoint are written",
        "before a checkpoint gets its manifest",
        "before a checkpoint gets its name",
        "before `latest` is made",
        "before `latest` moves",
        "before an old checkpoint is set aside for deletion",
        "in the midst of deleting an old checkpoint",
        "while `metrics.jsonl` is cut back",
    ],
    "Asked to stop": [
        "SIGTERM to one rank",
        "SIGTERM to all ranks, twice",
        "SIGTERM during an evaluation",
        "SIGTERM while rows are read",
        "SIGTERM to all ranks while the data of one are stuck",
        "SIGTERM again while the last checkpoint is written",
        "SIGTERM twice to torchrun",
        "SIGTERM to torchrun while the data is stuck",
        "SIGUSR1 to torchrun that passes it on",
        "SIGUSR1 to torchrun that does not, and dies",
    ],
    "Storage": [
        "the disk is full when a checkpoint is written",
        "the disk is full when a row of metrics is written",
        "the checkpoints become read-only",
        "the run directory is read-only from the start",
        "the newest checkpoint is truncated",
        "a bit of the newest checkpoint flips",
        "the newest checkpoint lacks a shard",
        "the newest checkpoint lacks its manifest",
        "`latest` points nowhere",
        "the newest checkpoint is of another model",
        "the newest checkpoint is from a newer version",
    ],
    "Numbers": [
        "the gradient of one rank is NaN",
        "the loss of one micro-batch is infinite",
        "the gradient of one rank is NaN in ten steps, and the run rolls back",
    ],
    "Machines that come and go": [
        "an agent of torchrun and its rank",
        "30 agents of torchrun at random moments, alone or with their ranks",
        "SIGTERM to an agent of torchrun",
        "an agent of torchrun that stalls and is taken for dead",
    ],
    "In a bucket": ["to and from a bucket that fails, at 30 random moments"],
    "Resumed elsewhere": [
        "on 4, 2, 3, 1, 4 ranks with 0, 2, 1 workers",
        "as FSDP 2, TP 2, PP 2, CP 2",
    ],
}
"""The names of all cases, in the order of the table."""


def names() -> list[str]:
    """The names of all cases."""
    return [name for group in CASES.values() for name in group]


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Show outcomes as the table of the documentation.

    Raises:
        ValueError: If a case is missing or unknown.
    """
    if missing := set(names()) ^ outcomes.keys():
        raise ValueError(
            f"the table needs every case and no other; these differ: {sorted(missing)}. "
            "Run all of tests/chaos, as make chaos does."
        )
    parts = []
    for group, cases in CASES.items():
        rows = "".join(_row(name, outcomes[name]) for name in cases)
        parts.append(f"## {group}\n\n{HEAD}{rows}")
    return "\n".join(parts)


def _row(name: str, outcome: Outcome) -> str:
    lost = f"at most {outcome.lost}" if outcome.lost else "0"
    return f"| {name} | {outcome.ended} | {outcome.status} | {lost} | {outcome.after} |\n"


def read_report(report: str) -> dict[str, Outcome]:
    """Read the outcomes of the cases that passed from a report of pytest, as JUnit XML."""
    passed = (
        case
        for case in ET.fromstring(report).iter("testcase")
        if not any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    )
    said: Iterable[ET.Element] = (tag for case in passed for tag in case.iter("property"))
    found = (json.loads(tag.attrib["value"]) for tag in said if tag.attrib["name"] == PROPERTY)
    return {name: Outcome(**outcome) for name, outcome in found}


def replace_table(page: str, rows: str) -> str:
    """Put a table into a page, in place of the one between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{rows}\n{END}{after}"


def main() -> None:
    """Write the table from a report."""
    outcomes = read_report(Path(sys.argv[1]).read_text())
    TARGET.write_text(replace_table(TARGET.read_text(), table(outcomes)))


if __name__ == "__main__":
    main()
