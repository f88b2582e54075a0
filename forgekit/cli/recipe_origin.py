"""Which recipe a copy began as: the stamp in its first lines names it, its version and a digest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shlex

import attrs

VERSION = importlib.metadata.version("forgekit")
STAMP = re.compile(
    rb"# Copied from forgekit (?P<version>\S+) recipes/(?P<file>[\w.\-]+) "
    rb"\(sha256 (?P<digest>[0-9a-f]{8})\)\.\n(?:# To compare: .*\n)?"
)


@attrs.frozen(kw_only=True)
class Origin:
    """The recipe that a copy began as.

    Attributes:
        version: The version of forgekit that made the copy.
        file: The recipe's file name.
        digest: First eight hexadecimal digits of the SHA-256 of its bytes.
    """

    version: str
    file: str
    digest: str


def origin_of(recipe: bytes, file: str) -> Origin:
    """The origin that a copy of a recipe made now has."""
    return Origin(version=VERSION, file=file, digest=digest_of(recipe))


def stamped(text: bytes, origin: Origin, copy: str) -> bytes:
    """Add the stamp to a text: before its docstring, which stays one, after ``#!``.

    Args:
        text: The copy's bytes, without a stamp.
        origin: What it is a copy of.
        copy: The copy's file name.
    """
    first, rest = _first_line(text)
    copy = shlex.quote(copy) if copy.isprintable() else "COPY"
    stamp = (
        f"# Copied from forgekit {origin.version} recipes/{origin.file} "
        f"(sha256 {origin.digest}).\n# To compare: forgekit diff {copy}\n"
    )
    return first + stamp.encode() + rest


def read_stamp(content: bytes) -> tuple[Origin, bytes] | None:
    """The origin of a copy, and its text without the stamp; None if it has no stamp."""
    first, rest = _first_line(content)
    match = STAMP.match(rest)
    if match is None:
        return None
    origin = Origin(**{name: value.decode() for name, value in match.groupdict().items()})
    return origin, first + rest[match.end() :]


def digest_of(content: bytes) -> str:
    """The digest of a recipe, as in its stamp."""
    return hashlib.sha256(content).hexdigest()[:8]


def _first_line(content: bytes) -> tuple[bytes, bytes]:
    """A line that begins with ``#!``, which counts only as the first one, and the rest."""
    end = content.find(b"\n") + 1 if content.startswith(b"#!") else 0
    return content[:end], content[end:]
