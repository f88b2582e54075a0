"""The tokenizer of an export: its files, how many tokens it has, and which one ends a text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.checks import path_of
from forgekit.data.tokenizer import END_OF_TEXT
from forgekit.huggingface.safetensors_files import read_json, write_json
from forgekit.ranks import CheckpointError

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"

TOKENIZER_FILES = (
    *(TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


def write_tokenizer(tokenizer: Any, directory: Path, like: Path | None) -> int | None:
    """Write a tokenizer's files.

    Args:
        tokenizer: Of transformers or tokenizers, a ``tokenizer.json``, or a directory with one;
            None takes what ``like`` has.
        directory: Where to.
        like: A directory in the same layout, or None.

    Returns:
        One more than the highest id of ``tokenizer.json``; None if that cannot be known.

    Raises:
        CheckpointError: If a path leads to none, or ``tokenizers`` cannot open what was written.
    """
    file = directory / TOKENIZER
    if tokenizer is None:
        _copy(like, directory)
    elif isinstance(tokenizer, str | os.PathLike):
        _copy(path_of("tokenizer", tokenizer), directory)
        if not any(directory.glob("tokenizer.*")):
            raise CheckpointError(
                f"tokenizer: {tokenizer} is no {TOKENIZER}, and no folder with one."
            )
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(directory))
    else:
        tokenizer.save(str(file))
    if not file.exists():
        return None
    count = _count_tokens(file)
    if not (directory / SETTINGS).exists():
        end = {"eos_token": END_OF_TEXT} if END_OF_TEXT in _added(directory) else {}
        write_json(directory / SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", **end})
    return count


def special_ids(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill a text; None for those that are not known."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: getattr(tokenizer, key, None) for key in keys}
    if ids["eos_token_id"] is None and (directory / TOKENIZER).exists():
        end = read_json(directory / SETTINGS).get("eos_token")
        end = end.get("content") if isinstance(end, Mapping) else end
        ids["eos_token_id"] = _added(directory).get(end)
    return ids


def _copy(source: Path | None, directory: Path) -> None:
    """Copy a ``tokenizer.json``, or all that a directory has of a tokenizer."""
    if source is not None and source.is_file():
        shutil.copyfile(source, directory / TOKENIZER)
    elif source is not None:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)


def _count_tokens(file: Path) -> int | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:  # an export does not fail for want of it
        return None
    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers has no class of its own
        raise CheckpointError(f"no tokenizer can be built from {TOKENIZER}: {error}.") from None
    return max(tokens.values(), default=-1) + 1


def _added(directory: Path) -> dict[str | None, int]:
    entries = read_json(directory / TOKENIZER).get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in entries}
