"""One answer of the doctor, and how a check that raises becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs

Outcome = Literal["good", "note", "bad"]


@attrs.frozen
class Check:
    """What was looked at, and what was found.

    Attributes:
        name: What was looked at, in a few words.
        outcome: "good"; "note" for what a run does without; "bad" for what would end it.
        text: What was found, with its unit; what to do about it unless it is good.
    """

    name: str
    outcome: Outcome
    text: str


def tried(name: str, look: Callable[[], str], remedy: str, *, otherwise: Outcome = "bad") -> Check:
    """Look at something; what raises gives its reason and the remedy.

    Args:
        name: What is looked at.
        look: Looks, and says what it found.
        remedy: What to do where it raises.
        otherwise: The outcome where it raises.
    """
    try:
        return Check(name, "good", look())
    except Exception as error:  # a driver, a network and a file system fail in their own ways
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return Check(name, otherwise, f"{said}. {remedy}")
