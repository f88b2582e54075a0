"""``forgekit plan``: a recipe's memory, collectives and time on machines that are not here."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console

from forgekit.cli.recipe_files import named, names_of, recipe_file
from forgekit.cli.usage import UsageError, exit_code, file_path, integer, script_file
from forgekit.inputs import brief, quoted
from forgekit.terminal import printable, tell

if TYPE_CHECKING:
    from forgekit.mesh import MeshSpec
    from forgekit.run.plan.result import Plan

ROWS = 8
"""Rows of the token file that stands in for one that is not there."""
SHARDS = 64
"""Ranks over which a sweep shards beside all of them."""
TRIED = 4
"""Changes of a layout that does not fit that are planned as well."""


def add_plan(commands: Any) -> None:
    """Declare ``forgekit plan`` and its arguments."""
    plan = commands.add_parser(
        "plan",
        parents=[_own_options()],
        allow_abbrev=False,
        help="find a recipe's memory, collectives and time without its machines",
        usage="forgekit plan RECIPE [--config FILE] [KEY=VALUE ...] --world N --device NAME",
    )
    recipe = "a .py file, or a name of `forgekit ls`"
    plan.add_argument("recipe", metavar="RECIPE", type=file_path, help=recipe)
    plan.add_argument("settings", metavar="KEY=VALUE", nargs=argparse.REMAINDER)
    plan.set_defaults(command=_plan)


def _own_options() -> argparse.ArgumentParser:
    """The command's own options, which may stand among the recipe's settings."""
    own = argparse.ArgumentParser("forgekit plan", add_help=False, allow_abbrev=False)
    option = own.add_argument
    option("--world", metavar="N", type=integer, default=1, help="number of devices (1)")
    option("--device", metavar="NAME", default="h100", help="a100, h100, h200 or b200 (h100)")
    option("--node-size", metavar="N", type=integer, default=8, help="devices of a node (8)")
    option("--json", action="store_true", help="print JSON")
    option("--sweep", action="store_true", help="rank the layouts of so many devices")
    return own


def _plan(options: argparse.Namespace) -> int:
    from forgekit.run.machines import MACHINES
    from forgekit.run.plan.stand_ins import PlanError

    _, options.settings = _own_options().parse_known_args(options.settings, options)
    _check(options, MACHINES)
    config, recipe, name = _configured(options)
    # Nothing is computed on an accelerator, and the recipe must not look for one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        plan = partial(_planned, options, recipe, Path(folder))
        _check_world(config.mesh, options)
        try:
            found = _swept(options, config, plan) if options.sweep else _fitting(config, plan, name)
        except PlanError as error:
            raise UsageError(str(error)) from None
    if found is None:
        return 1
    if options.json:
        shown = [one.as_json() for one in found] if options.sweep else found[0].as_json()
        print(json.dumps(shown, indent=1))
    else:
        _show(found, options, MACHINES[options.device].memory_bytes)
    return 0


def _check(options: argparse.Namespace, machines: Any) -> None:
    if options.device not in machines:
        raise UsageError(f"--device {brief(options.device)}: it is one of {quoted(machines)}.")
    for name in ("world", "node_size"):
        if (size := getattr(options, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {size}: it must be at least 1.")


def _check_world(mesh: MeshSpec, options: argparse.Namespace) -> None:
    from forgekit.mesh import resolve_sizes

    try:
        if not options.sweep:
            resolve_sizes(mesh, options.world)
    except ValueError as error:
        raise UsageError(f"--world {options.world}: {error}") from None


def _configured(options: argparse.Namespace) -> tuple[Any, dict[str, Any], str]:
    """The recipe's configuration, its names, and what to call it."""
    from forgekit.config import load_config

    given = options.recipe
    script = given if given.suffix == ".py" else recipe_file(options.recipes, str(given))
    script_file(script, "name a recipe's file, or one of `forgekit ls`.")
    recipe = names_of(script, "Config", "setup")
    try:
        config = load_config(recipe["Config"], options.settings, program=f"plan {script}")
    except SystemExit as stop:
        raise SystemExit(exit_code(stop.code)) from None
    if not hasattr(config, "mesh"):
        raise UsageError(f"{script} has no key mesh, so it has one layout: mesh: fk.MeshSpec.")
    return config, recipe, str(given)


def _planned(
    options: argparse.Namespace, recipe: dict[str, Any], folder: Path, config: Any
) -> Plan:
    """Plan one configuration."""
    from forgekit.mesh import resolve_sizes
    from forgekit.run.plan.plan import Job, plan_step

    pp, *_ = resolve_sizes(config.mesh, options.world)
    here = _without_machines(config, folder)
    job = Job(
        setup=lambda: named(recipe, recipe["setup"](here)),
        micro_batches=partial(_micro_batches, here),
        world=options.world,
        pp=pp,
        schedule=getattr(config, "pipeline_schedule", "1f1b"),
        device=options.device,
        node_size=options.node_size,
    )
    return plan_step(job)


def _fitting(config: Any, plan: Callable[[Any], Plan], name: str) -> list[Plan] | None:
    """Plan a configuration and, if it does not fit, what could be changed; None after an error."""
    from forgekit.run.plan.stand_ins import PlanError

    try:
        found = plan(config)
    except (UsageError, PlanError):
        raise
    except Exception as error:
        tell(f"{printable(name)} would end with {type(error).__name__}: {printable(str(error))}")
        return None
    return [found if found.fits else attrs.evolve(found, remedies=_remedies(config, plan))]


def _remedies(config: Any, plan: Callable[[Any], Plan]) -> tuple[str, ...]:
    """Changes with which a configuration would fit, each planned; the smallest need if none do."""
    tried: dict[str, Plan] = {}
    for text, changed in itertools.islice(_changes(config), TRIED):
        try:
            tried[text] = plan(changed)
        except Exception:  # a layout that is not valid is no remedy
            continue
    fitting = [text for text, one in tried.items() if one.fits]
    shown = fitting or sorted(tried, key=lambda text: tried[text].peak)[:1]
    verdict = "fits" if fitting else "least of what was tried"
    return tuple(f"{text}: {tried[text].peak / 2**30:.2f} GiB, {verdict}" for text in shown)


def _changes(config: Any) -> Iterator[tuple[str, Any]]:
    """Settings that need less memory, one change more in each."""
    texts: list[str] = []

    def change(text: str, **values: Any) -> tuple[str, Any]:
        nonlocal config
        config = attrs.evolve(config, **values)
        texts.append(text)
        return " ".join(texts), config

    if getattr(config, "activation_checkpoint", "full") != "full":
        yield change("activation_checkpoint=full", activation_checkpoint="full")
    if getattr(config, "batch_size", 1) > 1 and hasattr(config, "global_batch_size"):
        yield change("batch_size=1", batch_size=1)
    if config.mesh.dp_replicate > 1:
        mesh = attrs.evolve(config.mesh, dp_replicate=1, dp_shard=-1)
        yield change("mesh.dp_replicate=1 mesh.dp_shard=-1", mesh=mesh)
    mesh = attrs.evolve(config.mesh, dp_shard=-1, tp=2 * config.mesh.tp)
    yield change(f"mesh.dp_shard=-1 mesh.tp={mesh.tp}", mesh=mesh)


def _swept(
    options: argparse.Namespace, config: Any, plan: Callable[[Any], Plan]
) -> list[Plan] | None:
    """Plan each layout; those that fit first, by estimated time. None if none is valid."""
    found: list[Plan] = []
    refused: list[str] = []
    for spec in layouts(config.mesh, options.world, options.node_size):
        shown = " ".join(f"{k}={v}" for k, v in attrs.asdict(spec).items() if v != 1)
        try:
            found.append(plan(attrs.evolve(config, mesh=spec)))
            tell(f"{shown or 'one device'}: {found[-1].step_seconds:.3f} s")
        except Exception as error:
            refused.append(f"{shown}: {type(error).__name__}: {error}")
            tell(printable(refused[-1]))
    if not found:
        tell(f"none of {len(refused)} layouts of {options.world} devices is valid.")
        return None
    return sorted(found, key=lambda one: (not one.fits, one.step_seconds))


def layouts(given: MeshSpec, world: int, node_size: int) -> Iterator[MeshSpec]:
    """The layouts of a sweep: powers of two of ``pp`` and ``tp``, shards on all ranks or on 64.

    Args:
        given: What was configured; ``cp`` and ``ep`` stay as they are.
        world: Number of ranks.
        node_size: Ranks of a node, beyond which no tensor parallelism goes.
    """
    powers = [2**n for n in range(4)]
    for pp, tp in itertools.product(powers, powers):
        model = pp * tp * given.cp
        if tp > node_size or world % model:
            continue
        data = world // model
        for shards in sorted({data, min(data, SHARDS)}, reverse=True):
            if data % shards == 0 and shards * given.cp % given.ep == 0:
                sizes = {"dp_replicate": data // shards, "dp_shard": shards}
                yield attrs.evolve(given, pp=pp, tp=tp, **sizes)


def _without_machines(config: Any, folder: Path) -> Any:
    """Change what a configuration says of devices and files, where it has such keys."""
    changes: dict[str, Any] = {"out": folder / "run", "device": "cpu", "compile": False}
    if getattr(config, "activation_checkpoint", None) == "budget":  # which the compiler keeps
        changes["activation_checkpoint"] = "none"
    data = getattr(config, "data", None)
    path = getattr(data, "path", None)
    if isinstance(path, Path) and not path.exists() and attrs.has(type(data)):
        changes["data"] = attrs.evolve(data, path=_tokens(config, folder / "tokens"))
    return attrs.evolve(config, **{k: v for k, v in changes.items() if hasattr(config, k)})


def _tokens(config: Any, path: Path) -> Path:
    """Write a small token file; what is in it changes neither memory nor time."""
    import numpy as np

    from forgekit.data.corpus.token_files import write_tokens

    vocabulary = getattr(getattr(config, "model", None), "vocab_size", 0)
    if vocabulary and not path.exists():
        count = ROWS * getattr(config.data, "seq_len", 1024)  # and one that ends the document
        ids = np.arange(count) % max(vocabulary - 1, 1) + 1
        write_tokens(path, [ids % vocabulary], vocab_size=vocabulary, eos_id=0)
    return path


def _micro_batches(config: Any, built: Any) -> int:
    """Count the micro-batches of a step, by whatever the recipe says of them."""
    count = getattr(built.loader, "micro_batches", None)
    if callable(count) and hasattr(config, "global_batch_size"):
        return count(config.global_batch_size)  # pyright: ignore[reportReturnType]
    return getattr(built, "micro_batches", None) or getattr(config, "micro_batches", 1)


def _show(found: list[Plan], options: argparse.Namespace, memory_bytes: float) -> None:
    from forgekit.run.plan.result import show_plan, show_sweep

    console = Console(highlight=False, width=140)
    if options.sweep:
        show_sweep(found, console)
    else:
        show_plan(found[0], console, memory_bytes)
