"""``forgekit prepare``: token files and a tokenizer from text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forgekit.cli.usage import UsageError
from forgekit.terminal import tell


def add_prepare(commands: Any) -> None:
    """Declare ``forgekit prepare`` and its arguments."""
    prepare = commands.add_parser("prepare", help="make token files and a tokenizer from text")
    option = prepare.add_argument
    option(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="`stdlib` (Python's own sources), files, folders and URLs (text, code, JSON lines and "
        "arrays, .parquet, also compressed)",
    )
    option("--out", metavar="DIR", type=Path, required=True, help="a new folder")
    option("--vocab", metavar="SIZE", type=int, default=4096, help="vocabulary size (4096)")
    every = "keep every N-th document for evaluation (20)"
    option("--held-out-every", metavar="N", type=int, default=20, help=every)
    option("--text-key", metavar="KEY", default="text", help="key or column of the text (text)")
    option("--skip-broken", action="store_true", help="leave out and count what cannot be read")
    option("--tokenizer", metavar="PATH", help="use this tokenizer.json or its folder, train none")
    option("--workers", metavar="N", type=int, default=0, help="processes that encode (none)")
    closes = "closes a document (that of the tokenizer's folder, else <|endoftext|>)"
    option("--eos-token", metavar="TOKEN", help=closes)
    prepare.set_defaults(command=_prepare)


def _prepare(options: argparse.Namespace) -> int:
    from forgekit.data.prepare_corpus import prepare
    from forgekit.data.text_files import stdlib_documents, text_documents

    errors = "skip" if options.skip_broken else "raise"
    try:
        if options.sources == ["stdlib"]:
            documents = stdlib_documents()
        else:
            documents = text_documents(options.sources, text_key=options.text_key, errors=errors)
        prepared = prepare(
            documents,
            options.out,
            vocab_size=options.vocab,
            held_out_every=options.held_out_every,
            progress=lambda parts: tell(f"part {parts} of the tokens is written"),
            tokenizer=options.tokenizer,
            eos_token=options.eos_token,
            workers=options.workers,
        )
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from None
    except KeyboardInterrupt:
        tell("forgekit: interrupted; the same command continues from here.")
        return 1
    if not prepared.is_new:
        print(f"{prepared.path} was made from the same files before and stays unchanged.")
    for title, file in (("training", prepared.train), ("held out", prepared.held_out)):
        plural = "s" if file.documents != 1 else ""
        size = f"{file.documents:,} document{plural}, {file.tokens:,} tokens"
        ratio = file.metadata["text_bytes"] / file.tokens
        print(f"{title}   {file.path}  {size}, {ratio:.2f} bytes per token")
    learnt = prepared.path / "tokenizer.json"
    print(f"tokenizer  {learnt}  {prepared.train.vocab_size:,} tokens")
    if broken := prepared.broken:
        print(f"left out   {broken:,} broken documents; index.json names the first")
    return 0
