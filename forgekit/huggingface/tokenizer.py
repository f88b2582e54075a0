"""The tokenizer of an export: its files, size, and special ids."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from forgekit.checks import path_of
from forgekit.data.tokenizer import END_OF_TEXT
from forgekit.huggingface.safetensors_files import read_json, write_json
from forgekit.ranks import CheckpointError

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"

TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates."""

PROCESSORS = ("*processor_config.json", "audio_tokenizer_config.json")
TOKENIZERS = (
    *("tokenizer.*", SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES}/*.jinja"),
    *("vocab.json", "vocab.txt", "vocab-*.json", "*_vocab.json", "merges.txt", "bpe.codes"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer", "tekken.json", "dict.txt", "emoji.json"),
    *("normalizer.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json"),
)
"""Patterns of the files of tokenizers and processors."""


def write_tokenizer(tokenizer: Any, directory: Path, like: Path | None) -> int | None:
    """Write the files of a tokenizer and of processors.

    Args:
        tokenizer: Of transformers or tokenizers, a ``tokenizer.json``, or a directory that
            transformers opens; None takes what ``like`` has.
        directory: Where to.
        like: A directory in the same layout, whose processors are kept, or None.

    Returns:
        One more than the highest id of ``tokenizer.json``; None if that cannot be known.

    Raises:
        CheckpointError: If a path leads to none, or ``tokenizers`` cannot open what was written.
    """
    file = directory / TOKENIZER
    if like is not None:
        _copy(like, directory, tokenizer_files(like, *(() if tokenizer is None else PROCESSORS)))
    if isinstance(tokenizer, str | os.PathLike):
        source = path_of("tokenizer", tokenizer)
        names = tokenizer_files(source)
        if source.is_file():
            shutil.copyfile(source, file)
        elif any(not name.endswith(("_config.json", ".jinja")) for name in names):
            _copy(source, directory, names)
        else:
            raise CheckpointError(
                f"tokenizer {str(tokenizer)!r} must be a {TOKENIZER} or a folder that contains one."
            )
    elif tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(directory))
    elif tokenizer is not None:
        tokenizer.save(str(file))
    if not file.exists():
        return None
    count = _count_tokens(file)
    if tokenizer is not None and not (directory / SETTINGS).exists():
        end = {"eos_token": END_OF_TEXT} if END_OF_TEXT in _added(directory) else {}
        write_json(directory / SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", **end})
    return count


def special_ids(tokenizer: Any, directory: Path) -> dict[str, Any]:
    """Return the ids of the tokens that begin, end and pad a text; None if unknown."""
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: getattr(tokenizer, key, None) for key in keys}
    files = directory / TOKENIZER, directory / SETTINGS
    if ids["eos_token_id"] is None and all(file.exists() for file in files):
        end = read_json(directory / SETTINGS).get("eos_token")
        end = end.get("content") if isinstance(end, Mapping) else end
        ids["eos_token_id"] = _added(directory).get(end)
    return ids


def tokenizer_files(directory: Path, *patterns: str) -> list[str]:
    """List a directory's files of tokenizer and processors.

    Args:
        directory: The directory.
        *patterns: Of the files; all of them if none are given.
    """
    files = chain(*map(directory.glob, patterns or (*TOKENIZERS, *PROCESSORS)))
    return [str(file.relative_to(directory)) for file in files if file.is_file()]


def _copy(source: Path, directory: Path, names: list[str]) -> None:
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, directory / name)


def _count_tokens(file: Path) -> int | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:  # not worth failing an export
        return None
    try:
        tokens = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers has no class of its own
        raise CheckpointError(f"no tokenizer can be built from {TOKENIZER}: {error}.") from None
    return max(tokens.values(), default=-1) + 1


def _added(directory: Path) -> dict[str | None, int]:
    entries = read_json(directory / TOKENIZER).get("added_tokens") or []
    return {entry["content"]: entry["id"] for entry in entries}
