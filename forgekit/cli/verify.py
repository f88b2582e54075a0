"""``forgekit verify``: a recipe's layout against one process, in float64 on this machine."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs

from forgekit.cli.recipe_setup import (
    build,
    configured,
    import_recipe,
    micro_batches,
    opened,
    plain_settings,
    script_of,
)
from forgekit.cli.usage import UsageError, add_settings, file_path

if TYPE_CHECKING:
    from forgekit.mesh import MeshSpec


def add_verify(commands: Any) -> None:
    """Declare ``forgekit verify`` and its arguments."""
    verify = commands.add_parser(
        "verify",
        help="compare a recipe's layout with one process, in float64 on this machine",
        usage="forgekit verify [OPTIONS] RECIPE [--config FILE] [KEY=VALUE ...] [mesh.tp=2 ...]",
    )
    option = verify.add_argument
    recipe = "a .py file, or a name of `forgekit ls`"
    option("recipe", metavar="RECIPE", type=file_path, help=recipe)
    option("--tolerance", metavar="E", type=float, default=1e-8, help="relative error (1e-8)")
    option("--timeout", metavar="S", type=float, default=300.0, help="seconds for each run (300)")
    split = "let the gradient depend on the split into micro-batches"
    option("--keep-split", action="store_true", help=split)
    add_settings(verify)
    verify.set_defaults(command=_verify)


def _verify(options: argparse.Namespace) -> int:
    from rich.console import Console

    from forgekit.config import to_dict
    from forgekit.verification.verify import VerifyOptions, verify_setup

    script = script_of(options.recipe, options.recipes)
    with opened(script) as recipe:
        config = configured(recipe, options.settings, "verify")
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as out:
        settings = {**_sizes(config, options.settings), **plain_settings(config, out)}
        if hasattr(config, "precision"):
            settings["precision"] = "fp32"
        shown = (f"{name}={value}" for name, value in settings.items() if name != "out")
        progress.print("float64 on the CPU:", *shown, markup=False, soft_wrap=True)
        try:
            chosen = VerifyOptions(
                split=not options.keep_split,
                tolerance=options.tolerance,
                timeout_s=options.timeout,
                progress=partial(progress.print, "[dim]...[/]"),
            )
            setup = partial(_set_up, str(script.resolve()), to_dict(config) | settings)
            report = verify_setup(setup, config.mesh, chosen)
        except ValueError as error:
            raise UsageError(str(error)) from None
    print(report)
    return 0 if report.equal else 1


def _sizes(config: Any, settings: Sequence[str]) -> dict[str, int]:
    """Return small batch sizes that fit a layout, for keys that are not given."""
    names = {"global_batch_size", "batch_size"}
    given = {word.lstrip("-").partition("=")[0] for word in settings}
    if not all(hasattr(config, name) for name in names) or given & names:
        return {}
    mesh = config.mesh
    ranks, rows = max(mesh.dp_replicate, 1) * max(mesh.dp_shard, 1), min(config.batch_size or 2, 2)
    return {"global_batch_size": 2 * max(mesh.pp, 1) * rows * ranks, "batch_size": rows}


def _set_up(script: str, tree: dict[str, Any], mesh: MeshSpec) -> Any:
    """Run a recipe's setup with another mesh, on each rank of a layout."""
    from forgekit.config import structure

    recipe = import_recipe(Path(script))
    config = structure(recipe.Config, tree | {"mesh": attrs.asdict(mesh)})
    built = build(recipe, config)
    names = ("state", "loader", "loss_fn")
    return SimpleNamespace(
        **{name: getattr(built, name) for name in names},
        micro_batches=micro_batches(built, config),
    )
