"""The tokenizer of an export: its files, how many tokens it has, and which one ends a text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.data.tokenizer import END_OF_TEXT
from forgekit.huggingface.safetensors_files import read_json, write_json
from forgekit.inputs import path_of, wrong_type
from forgekit.ranks import CheckpointError

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"

TOKENIZER_FILES = (
    *(TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
)


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse what ``write_tokenizer`` could not write.

    Raises:
        TypeError: If it is neither a tokenizer nor a path.
    """
    is_one = hasattr(tokenizer, "save_pretrained") or hasattr(tokenizer, "save")
    if not (tokenizer is None or isinstance(tokenizer, str | os.PathLike) or is_one):
        raise wrong_type("tokenizer", tokenizer, "a tokenizer, or the path of a tokenizer.json")


def write_tokenizer(tokenizer: Any, directory: Path, like: Path | None) -> None:
    """Write a tokenizer's files.

    Args:
        tokenizer: Of transformers or tokenizers, a ``tokenizer.json``, or a directory with one;
            None takes what ``like`` has.
        directory: Where to.
        like: A directory in the same layout, or None.

    Raises:
        CheckpointError: If a path leads to none, or ``tokenizers`` cannot open what was written.
    """
    if tokenizer is None:
        if like is not None:
            _copy(like, directory)
    elif isinstance(tokenizer, str | os.PathLike):
        _copy_named(path_of("tokenizer", tokenizer), directory)
    elif hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(directory))
    else:
        tokenizer.save(str(directory / TOKENIZER))
    if (directory / TOKENIZER).exists():
        try:
            _open(directory)
        except Exception as error:  # tokenizers has no class of its own
            source = tokenizer if isinstance(tokenizer, str | os.PathLike) else like or TOKENIZER
            raise CheckpointError(f"no tokenizer can be built from {source}: {error}.") from None
    if (directory / TOKENIZER).exists() and not (directory / SETTINGS).exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if END_OF_TEXT in _added(directory):
            settings["eos_token"] = END_OF_TEXT
        write_json(directory / SETTINGS, settings)


def count_tokens(directory: Path) -> int | None:
    """One more than the highest id of ``tokenizer.json``; None if that cannot be known."""
    if not (directory / TOKENIZER).exists():
        return None
    if (tokenizer := _open(directory)) is None:
        return None
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def special_ids(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill a text; None for those that are not known."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {key: getattr(tokenizer, key, None) for key in keys}
    if found["eos_token_id"] is None and (directory / TOKENIZER).exists():
        found["eos_token_id"] = _added(directory).get(_end_of_text(directory))
    return found


def _open(directory: Path) -> Any:
    """The tokenizer of ``tokenizer.json``; None where ``tokenizers`` is not installed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:  # an export does not fail for want of it
        return None
    return Tokenizer.from_file(str(directory / TOKENIZER))


def _end_of_text(directory: Path) -> str | None:
    end = read_json(directory / SETTINGS).get("eos_token")
    return end.get("content") if isinstance(end, Mapping) else end


def _added(directory: Path) -> dict[str | None, int]:
    entries = read_json(directory / TOKENIZER).get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in entries}


def _copy(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _copy_named(source: Path, directory: Path) -> None:
    if source.is_file():
        shutil.copyfile(source, directory / TOKENIZER)
    elif (source / TOKENIZER).is_file() or (source / "tokenizer.model").is_file():
        _copy(source, directory)
    else:
        raise CheckpointError(f"tokenizer: {source} is no {TOKENIZER}, and no folder with one.")
