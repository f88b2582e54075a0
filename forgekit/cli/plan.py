"""``forgekit plan``: a recipe's memory, collectives and time, without its machines."""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from forgekit.checks import quoted
from forgekit.cli.recipe_setup import (
    build,
    configured,
    micro_batches,
    opened,
    plain_settings,
    script_of,
)
from forgekit.cli.usage import UsageError, add_settings, file_path
from forgekit.terminal import tell

if TYPE_CHECKING:
    from rich.console import Console

    from forgekit.plan.plan import Plan

ROWS = 8
"""Rows of the substitute for a missing token file."""


def add_plan(commands: Any) -> None:
    """Declare ``forgekit plan`` and its arguments."""
    plan = commands.add_parser(
        "plan",
        parents=[_options()],
        allow_abbrev=False,
        help="estimate a recipe's memory, collectives and time without its machines",
        usage="forgekit plan RECIPE [--config FILE] [KEY=VALUE ...] [OPTIONS]",
    )
    recipe = "a .py file, or a name of `forgekit ls`"
    plan.add_argument("recipe", metavar="RECIPE", type=file_path, help=recipe)
    add_settings(plan)
    plan.set_defaults(command=_plan)


def _options() -> argparse.ArgumentParser:
    """Parse the command's options, which may be mixed with the recipe's settings."""
    options = argparse.ArgumentParser("forgekit plan", add_help=False, allow_abbrev=False)
    option = options.add_argument
    option("--world", metavar="N", type=int, default=1, help="number of devices (1)")
    option("--device", metavar="NAME", default="h100", help="a100, h100, h200 or b200 (h100)")
    option("--node-size", metavar="N", type=int, default=8, help="devices of a node (8)")
    limit = "memory for tensors on a device (92%% of it)"
    option("--memory", metavar="GIB", type=float, help=limit)
    option("--json", action="store_true", help="print JSON")
    option("--sweep", action="store_true", help="rank the layouts of so many devices")
    return options


def _plan(options: argparse.Namespace) -> int:
    from unittest import mock

    from forgekit.metrics.device_specs import MACHINES
    from forgekit.plan.stand_ins import PlanError

    _, options.settings = _options().parse_known_args(options.settings, options)
    if options.device not in MACHINES:
        raise UsageError(f"--device {options.device!r}: it must be one of {quoted(MACHINES)}.")
    if min(options.world, options.node_size) < 1:
        raise UsageError("--world and --node-size must be at least 1.")
    with (
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}),
        opened(script_of(options.recipe, options.recipes)) as recipe,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = configured(recipe, options.settings, "plan")
        run = partial(_planned, options, recipe, Path(folder))
        try:
            if options.sweep:
                return _sweep(options, config, run)
            plan = run(config)
        except (PlanError, UsageError) as error:
            raise UsageError(str(error)) from None
        except (Exception, SystemExit) as error:
            tell(f"{options.recipe} would end with {type(error).__name__}: {error}")
            return 1
    from forgekit.plan.plan import show_plan

    if options.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        show_plan(plan, _console())
    return 0


def _planned(options: argparse.Namespace, recipe: ModuleType, folder: Path, config: Any) -> Plan:
    """Plan one configuration."""
    from forgekit.mesh import resolve_sizes
    from forgekit.plan.plan import Job, plan_step

    try:
        pp, *_ = resolve_sizes(config.mesh, options.world)
    except ValueError as error:
        raise UsageError(f"--world {options.world}: {error}") from None
    here = _without_machines(config, folder)
    job = Job(
        setup=partial(_set_up, recipe, here),
        micro_batches=partial(micro_batches, config=here),
        world=options.world,
        pp=pp,
        schedule=getattr(config, "pipeline_schedule", "1f1b"),
        device=options.device,
        node_size=options.node_size,
        memory_limit=None if options.memory is None else options.memory * 2**30,
    )
    return plan_step(job)


def _set_up(recipe: ModuleType, config: Any) -> Any:
    """Run ``setup``; of phases of sizes, plan the one with the longest rows."""
    built = build(recipe, config)
    if sizes := getattr(built.loader, "sizes", None):
        *_, start = max(zip(sizes.seq_lens, sizes.global_batch_sizes, sizes.starts, strict=True))
        built.loader.seek(start)
    return built


def _sweep(options: argparse.Namespace, config: Any, run: Any) -> int:
    """Plan and show the layouts of a world; return 1 if none is valid, 130 if interrupted."""
    from forgekit.plan.sweep import INTERRUPTED, layouts, show_sweep, sweep

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        plans, refused = sweep(
            layouts(config, options.world, options.node_size),
            lambda mesh: run(attrs.evolve(config, mesh=mesh)),
            tell,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        print(json.dumps([*(plan.as_json() for plan in plans), *refused], indent=1))
    else:
        show_sweep(plans, refused, _console())
    if any(one["refused"] == INTERRUPTED for one in refused):
        return 130
    return 0 if plans else 1


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=140)


def _without_machines(config: Any, folder: Path) -> Any:
    """Override a configuration's device and file keys, if it has them."""
    changes = plain_settings(config, folder / "run")
    data = getattr(config, "data", None)
    path = getattr(data, "path", None)
    vocabulary = getattr(getattr(config, "model", None), "vocab_size", 0)
    if isinstance(path, Path) and not path.exists() and attrs.has(type(data)) and vocabulary:
        tokens = _tokens(vocabulary, getattr(data, "seq_len", 1024), folder / "tokens")
        changes["data"] = attrs.evolve(data, path=tokens)
    return attrs.evolve(config, **changes)


def _tokens(vocabulary: int, positions: int, path: Path) -> Path:
    """Write a small token file; its content affects neither memory nor time."""
    import numpy as np

    from forgekit.data.token_files import write_tokens

    if not path.exists():
        count = ROWS * positions  # and an end-of-document id
        ids = np.arange(count) % max(vocabulary - 1, 1) + 1
        write_tokens(path, [ids % vocabulary], vocab_size=vocabulary, eos_id=0)
    return path
