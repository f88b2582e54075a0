"""``forgekit export``: the newest checkpoint of a run as a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgekit.cli.usage import UsageError, file_path
from forgekit.terminal import printable

if TYPE_CHECKING:
    from forgekit.model.transformer import TransformerSpec


DTYPES = ("float32", "bfloat16", "float16")


def add_export(commands: Any) -> None:
    """Declare ``forgekit export`` and its arguments."""
    export = commands.add_parser("export", help="write a run's model as a Hugging Face directory")
    option = export.add_argument
    option("run", metavar="RUN", type=file_path, help="a run directory")
    option("directory", metavar="DIR", type=file_path, help="the new directory")
    option("--step", metavar="N", type=int, help="of this checkpoint (the newest)")
    option("--like", metavar="MODEL", help="a family, such as mistral, or a directory (llama)")
    option("--dtype", choices=DTYPES, help="of the weights (as they are)")
    option("--tokenizer", metavar="PATH", type=file_path, help="a tokenizer.json (the run's)")
    option("--check", action="store_true", help="compare logits with those of transformers")
    export.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> int:
    import torch

    from forgekit.run.checkpoints.errors import CheckpointError
    from forgekit.run.huggingface.save import save_huggingface

    tree = _config(options.run)
    spec = _spec(options.run, tree)
    tokenizer = options.tokenizer or _tokenizer(tree)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    try:
        model, step = _load(options, spec)
        save_huggingface(
            model,
            options.directory,
            tokenizer,
            options.like,
            dtype=dtype,
            check_logits=options.check,
        )
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None
    print(f"step       {step}")
    print(f"tokenizer  {printable(str(tokenizer or options.like or 'none'))}")
    print(f"written to {printable(str(options.directory))}")
    return 0


def _config(run: Path) -> Mapping[str, Any]:
    from forgekit.inputs import parse_json

    path = run / "config.json"
    try:
        tree = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}. Name a run directory: what a recipe's out= was."
        ) from None
    return tree if isinstance(tree, dict) else {}


def _spec(run: Path, tree: Mapping[str, Any]) -> TransformerSpec:
    from forgekit.config import ConfigError
    from forgekit.config.strict import structure
    from forgekit.model.transformer import TransformerSpec

    try:
        return structure(TransformerSpec, tree.get("model") or {})
    except ConfigError as error:
        raise UsageError(
            f"{run / 'config.json'} has no TransformerSpec as model: {error}"
        ) from None


def _tokenizer(tree: Mapping[str, Any]) -> Path | None:
    """The tokenizer beside the data that a run was trained on, if it is still there."""
    data = tree.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    file = Path(path, "tokenizer.json") if isinstance(path, str) else None
    return file if file is not None and file.is_file() else None


def _load(options: argparse.Namespace, spec: TransformerSpec) -> tuple[Any, int]:
    import torch

    from forgekit.model.transformer import Transformer
    from forgekit.run.checkpoints.load import checkpoint_load
    from forgekit.run.checkpoints.storage import latest_checkpoint
    from forgekit.state import TrainState

    folder = options.run / "checkpoints"
    if latest_checkpoint(folder) is None:
        raise UsageError(f"{folder} has no checkpoint to export.")
    with torch.device("meta"):
        model = Transformer(spec)
    model.to_empty(device="cpu")
    state = TrainState.create(model, torch.optim.SGD(model.parameters()))
    parts = ("model", "fields")
    state = checkpoint_load(state, folder, step=options.step, parts=parts, allow_other_data=True)
    return model, state.step
