"""Files that a crash or a full disk leaves whole: the old content or the new, never a part."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that readers, and a crash, find the old content or the new, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def overwrite(file: FileIO, start: int, new: bytes, old: bytes = b"") -> None:
    """Write the end of a file anew: all of ``new``, or what was there, never a part.

    A full disk takes the first bytes of a write and refuses the rest. What was written then goes
    away again, so that the next writer does not begin in the midst of a line.

    Args:
        file: Opened unbuffered for reading and writing.
        start: Where the end begins.
        new: What is to stand there.
        old: What stands there; it is put back if ``new`` does not fit.

    Raises:
        OSError: If ``new`` could not be written.
    """
    try:
        _write_all(file, start, new)
    except OSError:
        _write_all(file, start, old)
        raise


def append_lines(path: str | os.PathLike[str], lines: Sequence[str]) -> None:
    """Append lines and wait until they are durable; all of them or none, after whole lines only."""
    Path(path).touch()
    with open(path, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")  # by a crash, or by a version before this one
        content = "".join([*(["\n"] if is_torn else []), *(f"{line}\n" for line in lines)])
        overwrite(file, end, content.encode())
        os.fsync(file.fileno())


def _write_all(file: FileIO, start: int, content: bytes) -> None:
    file.seek(start)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.truncate()
