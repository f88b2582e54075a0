"""Printing: without control characters, and to streams that may be closed.

A reader of the output can vanish at any time (`| head`, a closed terminal, a full disk). That is
the end of the display and not of the run, so nothing that is written here ever raises.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move the cursor, change colours or reorder text; not newline and tab."""


def printable(text: object) -> str:
    r"""Escape control characters, so that names, values and samples cannot steer a terminal.

    Examples:
        >>> print(printable("\x1b[31mred\x07 and caf\u00e9"))
        \x1b[31mred\x07 and café
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


class Steady:
    """A text stream whose writes never fail: text that cannot be written is dropped.

    After a failure the descriptor leads to /dev/null, also for what is still buffered: Python
    flushes at exit and would turn any exit code into 120.

    Attributes:
        lost: The first error; None as long as everything was written.
    """

    def __init__(self, stream: TextIO) -> None:
        self.lost: OSError | None = None
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush the buffer, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.lost = self.lost or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        except OSError:
            return  # a stream without a descriptor needs nothing at exit
        finally:
            os.close(nowhere)


@contextmanager
def steady_streams() -> Iterator[tuple[Steady, Steady]]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by ``Steady`` streams within the block.

    Descriptors that were closed (`2>&-`) lead to /dev/null from here on. Else the next file that
    is opened would get their number, and what a library prints would end up in it.

    Yields:
        Both streams.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    os.close(nowhere)
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as missing:  # Python has None for a closed descriptor
        steady = Steady(before[0] or missing), Steady(before[1] or missing)
        sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", steady)
        try:
            yield steady
        finally:
            for stream in steady:
                stream.flush()
            sys.stdout, sys.stderr = before


def tell(text: object) -> None:
    """Print text on stderr, if it is still open."""
    with steady_streams() as (_, stderr):
        stderr.write(f"{printable(text)}\n")


def tell_once(text: object) -> None:
    """Print a message that all processes of a job have, once per machine."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    if local == "0" or not local.isdigit():  # where it holds no rank, every process does
        tell(text)
