"""Texts to prepare and stream, and what was made of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from forgekit.data import prepare_corpus
from forgekit.data import tokenizer as encoding
from forgekit.data.text_files import text_documents

CORPUS = Path(__file__).parent / "data" / "corpus"
TEXTS = [text for _, text in text_documents(CORPUS)]


def write_lines(file: Path, count: int = 400, broken: int = 97) -> list[str]:
    """Write lines of JSON, of which every so many is broken; return the texts of the others."""
    chance = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "far", "hill"]
    sizes = (chance.choice([2, 9, 40, 90]) for _ in range(count))
    texts = [f"{' '.join(chance.choices(words, k=size))} {n}" for n, size in enumerate(sizes)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[broken::broken] = ["{broken"] * len(lines[broken::broken])
    file.write_text("\n".join(lines))
    return [text for number, text in enumerate(texts) if number < broken or number % broken]


def small_steps(monkeypatch: Any, part: int = 2000) -> None:
    """Many batches and parts on little text."""
    monkeypatch.setattr(encoding, "AT_ONCE", 2000)
    monkeypatch.setattr(encoding, "PIECE", 500)
    monkeypatch.setattr(prepare_corpus, "PART_BYTES", part)


def content_of(folder: Path) -> dict[Path, bytes]:
    """Files below a folder and what is in them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in files}
