"""What a run keeps in its directory, and whether a directory can be one."""

from __future__ import annotations

import tempfile
from pathlib import Path

__all__ = ["check_directory"]

FILES = (
    *(".lock", "config.json", "config_changes.jsonl"),
    *("metrics.jsonl", "bad_steps.jsonl", "status.json"),
)
"""What a run keeps in its directory as plain files; a FIFO among them would hang it."""


def check_directory(out: str | Path) -> None:
    """Refuse a run directory in which set-up would fail later, or hang.

    Raises:
        ValueError: If it cannot be made or written, or if something else has the name of a file
            or folder that a run keeps in it.
    """
    try:
        if not str(out):
            raise ValueError("the name is empty")
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(
            f"{_short_name(out)} cannot be a run directory: {why}. Choose another, out=DIR."
        ) from None
    wrong = [name for name in FILES if _exists(path := Path(out) / name) and not path.is_file()]
    checkpoints = Path(out) / "checkpoints"
    wrong += ["checkpoints"] if _exists(checkpoints) and not checkpoints.is_dir() else []
    if wrong:
        kind = "folder" if wrong[0] == "checkpoints" else "file"
        raise ValueError(
            f"{Path(out) / wrong[0]} is not a {kind}, and a run keeps one of that name. Move it "
            "away, or choose another run directory, out=DIR."
        )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _short_name(out: str | Path) -> str:
    return text if len(text := str(out)) <= 200 else f"{text[:197]}..."
