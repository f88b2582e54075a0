"""URLs of object stores: joined like paths, read and written with retries.

A bucket is reached through a network that stumbles. What may pass (a time-out, a refused or cut
connection, a store that throttles or fails) is tried again after growing pauses, for minutes; what
will not (no credentials, no such bucket, no permission) is refused at once, in one sentence. An
object that is not there is neither: that is an answer. "Could not ask" never looks like it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any, TypeAlias, TypeVar

from forgekit.checks import path_of
from forgekit.environment import require

PATIENCE_S = 300.0
"""How long a store may fail to answer before a run gives up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)(::[^/]*)?:///*[^/]")
_ALMOST_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
_ANSWERS = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError),
    *(ValueError, TypeError, ImportError, AssertionError),
)
"""Errors about an object or the caller, which are not retried."""
_ANSWERED = (errno.EINVAL, errno.ELOOP, errno.ENXIO)
"""Errors of opening a pipe, a socket or a link as a file."""
_LASTING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)
"""Errors of file systems that are not retried."""
_PASSING = (
    *("RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
    *("Throttling", "ThrottlingException", "SlowDown", "OperationAborted"),
    *("ConditionalRequestConflict", "400", "408", "409", "425", "429"),
)
"""S3's codes below 500 for what may pass; 400 is that of any answer without a body, as to HEAD."""
PRECONDITION = ("PreconditionFailed", "412")
"""S3's codes for a failed condition of a conditional write."""
_REFUSED = ("NoSuchBucket", "NoCredentialsError", "PartialCredentialsError", "ParamValidationError")
"""Codes and names of errors that no pause can cure, beside those of permissions."""

T = TypeVar("T")

log = logging.getLogger("forgekit")


class UrlError(OSError):
    """A URL cannot be reached; the message is one sentence with the remedy."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)

    def __str__(self) -> str:
        return str(self.strerror)


class Url(str):
    """A URL with path-like joins; a ``Path`` would merge its slashes.

    Examples:
        >>> Url("s3://bucket/runs/") / "a"
        's3://bucket/runs/a'
        >>> (Url("s3://bucket/runs") / "a").name
        'a'
    """

    __slots__ = ()

    def __truediv__(self, name: str | os.PathLike[str]) -> Url:
        return Url(f"{self.rstrip('/')}/{os.fspath(name).strip('/')}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The part before the last slash."""
        return Url(self.rstrip("/").rpartition("/")[0])


Location: TypeAlias = Path | Url
"""A path or a URL."""


def is_url(value: object) -> bool:
    """Whether a value is text with a scheme, such as ``s3://bucket/run``."""
    return isinstance(value, str) and _URL.match(value) is not None


def path_or_url(value: str | os.PathLike[str]) -> Location:
    """Convert to a URL or path.

    Raises:
        ValueError: If it is a URL that became a path, or has one slash or nothing after them.

    Examples:
        >>> path_or_url("s3://bucket/run/"), path_or_url("runs/a").name
        ('s3://bucket/run', 'a')
    """
    text = os.fspath(value)
    if is_url(text):
        return Url(text.rstrip("/"))
    if _ALMOST_URL.match(text):
        raise ValueError(
            f"{text} looks like a URL that became a Path or lacks a part; pass a string such as "
            "s3://bucket/folder."
        )
    return Path(text)


def location_of(name: str, value: str | os.PathLike[str]) -> Location:
    """Convert to a valid path or URL; ``name`` is the argument's, for messages."""
    is_text = isinstance(value, str)
    is_either = isinstance(value, Path) or is_url(value) or (is_text and _ALMOST_URL.match(value))
    return path_or_url(value) if is_either else path_of(name, value)


def fs_of(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the URL as its path there.

    It remembers no listings, which others may change.

    Raises:
        ValueError: If no installed package knows the URL's scheme.
        ImportError: If the package that fsspec needs for it is not installed.
    """
    from fsspec import available_protocols
    from fsspec.core import url_to_fs

    scheme = url.partition(":")[0].lower()
    if scheme not in available_protocols():
        raise ValueError(f"fsspec does not know the scheme {scheme!r} of {url}.")
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        require("s3fs", extra="s3")
        # botocore's retries, times those of s3fs, would go on for minutes after our patience
        options = {"config_kwargs": {"retries": {"max_attempts": 0}}}
    elif scheme in ("file", "local"):
        options = {"auto_mkdir": True}
    url = scheme + url[len(scheme) :]
    fs, root = url_to_fs(url, use_listings_cache=False, **options)
    return fs, root.rstrip("/")


def entries_below(fs: Any, root: str) -> list[dict[str, Any]]:
    """List a folder's entries as fsspec describes them; empty if it does not exist.

    Raises:
        UrlError: If its bucket is not there, or the store cannot be asked.
    """
    try:
        name = fs.unstrip_protocol(root)
        return retried(lambda: fs.ls(root, detail=True, refresh=True), name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def names_below(fs: Any, root: str) -> list[str]:
    """List the names in a folder, as ``entries_below`` does."""
    return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries_below(fs, root)]


def content_of(file: Location, *, patience_s: float | None = None) -> bytes | None:
    """Read a whole file or object into memory; None if there is none.

    Args:
        file: The file or object.
        patience_s: How long a store may fail to answer; None is ``PATIENCE_S``.

    Raises:
        UrlError: If a store refuses, or has not answered in time.
    """
    if isinstance(file, Path):
        return file.read_bytes() if file.is_file() else None
    fs, root = fs_of(file)
    try:
        return retried(lambda: fs.cat_file(root), file, patience_s=patience_s)
    except (FileNotFoundError, IsADirectoryError):
        return None


def retried(
    action: Callable[[], T],
    name: str,
    *,
    patience_s: float | None = None,
    before: Callable[[], None] | None = None,
) -> T:
    """Call a function of a store, with growing pauses between retries while it does not answer.

    Args:
        action: What to do; it may be done several times, also after it was done unnoticed.
        name: What is read or written, for messages.
        patience_s: How long it may take; None is ``PATIENCE_S``.
        before: Called before each attempt; its errors are raised.

    Raises:
        FileNotFoundError: If there is no such object, and other errors of ``action`` that say
            something about the object.
        UrlError: If the store refuses, or has not answered in time.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    began, paused, middle = time.monotonic(), 0.0, FIRST_PAUSE_S
    while True:
        if before is not None:
            before()
        try:
            return action()
        except Exception as error:  # stores raise own classes
            if refusal := _refusal(error):
                raise UrlError(f"{name}: the store refuses it: {refusal}.") from error
            if refusal is not None:
                raise
            pause = middle * SystemRandom().uniform(0.7, 1.3)  # jitter between ranks
            if max(paused, time.monotonic() - began) + pause > patience_s:
                raise UrlError(
                    f"{name}: the store has failed for {patience_s:.0f} s: {_brief(error)}."
                ) from error
            log.warning("%s: %s; next try in %.1f s", name, _brief(error), pause)
            time.sleep(pause)
            paused += pause
            middle = min(2 * middle, LONGEST_PAUSE_S)


def local_folder() -> Path:
    """Return the local folder for copies of remote data.

    ``FORGEKIT_CACHE``, else ``XDG_CACHE_HOME/forgekit``, else ``~/.cache/forgekit``.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FORGEKIT_CACHE") or Path(base, "forgekit"))


def _refusal(error: BaseException) -> str | None:
    """Return the text of a permanent error, "" for an answer, None to retry."""
    code, number = code_of(error), getattr(error, "errno", None)
    if code in _REFUSED or number in _LASTING or isinstance(error, PermissionError):
        return _brief(error)
    if code in _PASSING:  # before errno: fsspec calls a torn upload an invalid argument
        return None
    # FileExpired: s3fs, of an object that changes while it is read
    if isinstance(error, FileNotFoundError) or code in (*PRECONDITION, "FileExpired"):
        return ""
    status = (_response(error) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if 300 <= status < 500:
        return _brief(error)
    return "" if isinstance(error, _ANSWERS) or number in _ANSWERED else None


def _response(error: BaseException) -> dict[str, Any] | None:
    """Return the store's response; s3fs has botocore's error as the cause of its own."""
    for one in (error, error.__cause__, error.__context__):
        if isinstance(response := getattr(one, "response", None), dict):
            return response
    return None


def code_of(error: BaseException) -> str:
    """Return the code of the store's answer, else the name of the error."""
    response = _response(error)
    return str(response.get("Error", {}).get("Code")) if response else type(error).__name__


def _brief(error: BaseException) -> str:
    text = str(getattr(error, "strerror", None) or error).strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
