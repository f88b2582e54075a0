"""``forgekit export``: the newest checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import argparse
from typing import Any

from forgekit.cli.usage import UsageError, file_path
from forgekit.terminal import printable

DTYPES = ("float32", "bfloat16", "float16")


def add_export(commands: Any) -> None:
    """Declare ``forgekit export`` and its arguments."""
    export = commands.add_parser("export", help="write a run's model as a Hugging Face directory")
    option = export.add_argument
    option("run", metavar="RUN", type=file_path, help="a run directory")
    option("directory", metavar="DIR", type=file_path, help="the new directory")
    option("--step", metavar="N", type=int, help="of this checkpoint (the newest)")
    option("--like", metavar="MODEL", help="a family, such as mistral, or a directory (its base)")
    option("--dtype", choices=DTYPES, help="of the weights (as they are)")
    option("--tokenizer", metavar="PATH", type=file_path, help="a tokenizer.json (the run's)")
    option("--check", action="store_true", help="compare logits with those of transformers")
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    import torch

    from forgekit.huggingface.save import save_huggingface
    from forgekit.lora.adapters import merge_lora
    from forgekit.model.lora import lora_layers
    from forgekit.ranks import CheckpointError
    from forgekit.run.load_run import read_model, read_run_config, tokenizer_file

    try:
        config = read_run_config(options.run)
        base = config.get("base")
        like = options.like or base
        tokenizer = options.tokenizer or (None if base else tokenizer_file(config))
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        model, step = read_model(options.run, config, options.step)
        if lora_layers(model):
            merge_lora(model)
        save_huggingface(
            model, options.directory, tokenizer, like, dtype=dtype, check_logits=options.check
        )
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None
    print(f"step       {step}")
    print(f"tokenizer  {printable(str(tokenizer or like or 'none'))}")
    print(f"written to {printable(str(options.directory))}")
    return 0
