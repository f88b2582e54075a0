"""The tables of ``docs/survival.md``, with which each case of the suite compares its outcome.

Nothing in a row changes from run to run: of what varies, such as the steps that a kill costs, it
has the bound that was checked.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

PAGE = Path(__file__).parents[2] / "docs" / "survival.md"
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

    def __str__(self) -> str:
        """The cells of its row."""
        lost = f"at most {self.lost}" if self.lost else "0"
        return f"| {self.ended} | {self.status} | {lost} | {self.after} |"


def rows() -> dict[str, str]:
    """The cells of all cases of the page, by what was done."""
    found = re.findall(r"^\| (.+?) (\| .+ \|)$", PAGE.read_text(), re.M)
    return {name: cells for name, cells in found if name != "what was done"}


def compare(name: str, outcome: Outcome) -> None:
    """Compare a case with its row."""
    assert str(outcome) == rows()[name]
