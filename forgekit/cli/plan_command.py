"""``forgekit plan``: a recipe's memory, collectives and time on machines that are not here."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console

from forgekit.cli.recipe_setup import build, micro_batches, opened, script_of
from forgekit.cli.usage import (
    UsageError,
    add_settings,
    exit_code,
    file_path,
    integer,
)
from forgekit.inputs import brief, quoted
from forgekit.terminal import printable, tell

if TYPE_CHECKING:
    from forgekit.mesh import MeshSpec
    from forgekit.plan.result import Plan
    from forgekit.plan.sweep import LeftOut

    Planner = Callable[..., Plan]
    Swept = tuple[list[Plan], list[LeftOut]]

ROWS = 8
"""Rows of the token file that stands in for one that is not there."""
EVERY = 'sync="every" in the recipe\'s make_step'
"""What a recipe says to reduce gradients after every micro-batch; it is no setting."""


def add_plan(commands: Any) -> None:
    """Declare ``forgekit plan`` and its arguments."""
    plan = commands.add_parser(
        "plan",
        parents=[_own_options()],
        allow_abbrev=False,
        help="find a recipe's memory, collectives and time without its machines",
        usage="forgekit plan RECIPE [--config FILE] [KEY=VALUE ...] [OPTIONS]",
    )
    recipe = "a .py file, or a name of `forgekit ls`"
    plan.add_argument("recipe", metavar="RECIPE", type=file_path, help=recipe)
    add_settings(plan)
    plan.set_defaults(command=_plan)


def _own_options() -> argparse.ArgumentParser:
    """The command's own options, which may stand among the recipe's settings."""
    own = argparse.ArgumentParser("forgekit plan", add_help=False, allow_abbrev=False)
    option = own.add_argument
    option("--world", metavar="N", type=integer, default=1, help="number of devices (1)")
    option("--device", metavar="NAME", default="h100", help="a100, h100, h200 or b200 (h100)")
    option("--node-size", metavar="N", type=integer, default=8, help="devices of a node (8)")
    limit = "what tensors may take of a device (92%% of its memory)"
    option("--memory", metavar="GIB", type=float, help=limit)
    option("--json", action="store_true", help="print JSON")
    option("--sweep", action="store_true", help="rank the layouts of so many devices")
    return own


def _plan(options: argparse.Namespace) -> int:
    from forgekit.metrics.device_specs import MACHINES
    from forgekit.plan.stand_ins import PlanError

    _, options.settings = _own_options().parse_known_args(options.settings, options)
    _check(options, MACHINES)
    with _without_accelerators(), opened(script_of(options.recipe, options.recipes)) as recipe:
        config = _configured(options, recipe)
        _check_world(config.mesh, options)
        with tempfile.TemporaryDirectory() as folder:
            plan = partial(_planned, options, recipe, Path(folder))
            try:
                if options.sweep:
                    found = _swept(options, config, plan)
                else:
                    found = _fitting(config, plan, str(options.recipe))
            except PlanError as error:
                raise UsageError(str(error)) from None
    if found is None:
        return 1
    _show(found, options)
    return 0


def _check(options: argparse.Namespace, machines: Any) -> None:
    if options.device not in machines:
        raise UsageError(f"--device {brief(options.device)}: it is one of {quoted(machines)}.")
    for name in ("world", "node_size"):
        if (size := getattr(options, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {size}: it must be at least 1.")
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise UsageError(f"--memory {options.memory}: it must be above 0, in GiB.")


def _check_spelling(settings: Sequence[str], keys: Sequence[str]) -> None:
    """Raise for what resembles an option of this command more than a key of the recipe."""
    names = vars(_own_options().parse_args([]))
    options = [f"--{name.replace('_', '-')}" for name in names]
    known = [*options, "--config", "--help", *(f"--{key}" for key in keys)]
    for word in (setting.partition("=")[0] for setting in settings):
        nearest = difflib.get_close_matches(word, known, n=1)
        if word.startswith("--") and word not in known and set(nearest) & set(options):
            raise UsageError(
                f"{printable(word)} is no option of forgekit plan and no key of the recipe; the "
                f"nearest is {nearest[0]}."
            )


def _check_world(mesh: MeshSpec, options: argparse.Namespace) -> None:
    from forgekit.mesh import resolve_sizes

    try:
        if not options.sweep:
            resolve_sizes(mesh, options.world)
    except ValueError as error:
        raise UsageError(f"--world {options.world}: {error}") from None


def _configured(options: argparse.Namespace, recipe: ModuleType) -> Any:
    """The recipe's configuration."""
    from forgekit.config import keys_of, load_config

    script = recipe.__file__
    _check_spelling(options.settings, [key.name for key in keys_of(recipe.Config)])
    try:
        config = load_config(recipe.Config, options.settings, program=f"plan {script}")
    except SystemExit as stop:
        raise SystemExit(exit_code(stop.code)) from None
    if not hasattr(config, "mesh"):
        raise UsageError(f"{script} has no key mesh, so it has one layout: mesh: fk.MeshSpec.")
    return config


@contextmanager
def _without_accelerators() -> Iterator[None]:
    """Nothing is computed on an accelerator, and the recipe must not look for one."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _planned(
    options: argparse.Namespace,
    recipe: ModuleType,
    folder: Path,
    config: Any,
    reduces_each: bool = False,
) -> Plan:
    """Plan one configuration, or it with gradients that are reduced after each micro-batch."""
    from forgekit.mesh import resolve_sizes
    from forgekit.plan.plan import Job, plan_step

    pp, *_ = resolve_sizes(config.mesh, options.world)
    here = _without_machines(config, folder)

    def setup() -> Any:
        built = build(recipe, here)
        return _reducing_each(built) if reduces_each else built

    job = Job(
        setup=setup,
        micro_batches=partial(micro_batches, config=here),
        world=options.world,
        pp=pp,
        schedule=getattr(config, "pipeline_schedule", "1f1b"),
        device=options.device,
        node_size=options.node_size,
        memory_limit=None if options.memory is None else options.memory * 2**30,
    )
    return plan_step(job)


def _reducing_each(built: Any) -> Any:
    """What ``setup`` returned, with a step that reduces gradients after every micro-batch."""
    from forgekit.steps.make_step import make_step

    names = ("state", "loader", "loss_fn", "stop", "end", "micro_batches")
    given = {name: getattr(built, name, None) for name in names}
    step = make_step(built.loss_fn, schedule=lambda _: 0.0, sync="every", stop=given["stop"])
    return SimpleNamespace(**given, step=step)


def _fitting(config: Any, plan: Planner, name: str) -> Plan | None:
    """Plan a configuration and, if it does not fit, what could be changed; None after an error."""
    from forgekit.plan.stand_ins import PlanError

    try:
        found = plan(config)
    except (UsageError, PlanError):
        raise
    except (Exception, SystemExit) as error:
        tell(f"{printable(name)} would end with {type(error).__name__}: {printable(str(error))}")
        return None
    return found if found.fits else attrs.evolve(found, remedies=_remedies(config, found, plan))


def _remedies(config: Any, found: Plan, plan: Planner) -> tuple[str, ...]:
    """Changes with which a configuration would fit, each planned; the smallest need if none do."""
    tried: dict[str, Plan] = {}
    for text, changed, reduces_each in _changes(config, found):
        try:
            tried[text] = plan(changed, reduces_each)
        except Exception:  # a layout that is not valid is no remedy
            continue
    fitting = [text for text, one in tried.items() if one.fits]
    shown = fitting or sorted(tried, key=lambda text: tried[text].peak)[:1]
    verdict = "fits" if fitting else "least of what was tried"
    return tuple(f"{text}: {tried[text].peak / 2**30:.2f} GiB, {verdict}" for text in shown)


def _changes(config: Any, found: Plan) -> Iterator[tuple[str, Any, bool]]:
    """What needs less memory, one change more in each.

    Until the last micro-batch ``sync="last"`` keeps gradients that are not sharded; a pipeline
    always does.

    Yields:
        How to say it, the settings, and whether gradients are reduced after each micro-batch.
    """
    texts: list[str] = []
    reduces_each = False
    keeps = found.layout["pp"] == 1 and found.layout["dp_shard"] * found.layout["cp"] > 1

    def change(text: str, **values: Any) -> tuple[str, Any, bool]:
        nonlocal config
        config = attrs.evolve(config, **values)
        texts.extend([text] if text else [])
        every = [EVERY] if reduces_each else []
        return " and ".join([*filter(None, [" ".join(texts)]), *every]), config, reduces_each

    if keeps and found.micro_batches > 1:
        reduces_each = True
        yield change("")
    if getattr(config, "activation_checkpoint", "full") != "full":
        yield change("activation_checkpoint=full", activation_checkpoint="full")
    if getattr(config, "batch_size", 1) != 1 and hasattr(config, "global_batch_size"):
        yield change("batch_size=1", batch_size=1)
        if keeps and not reduces_each:  # now there are several micro-batches
            reduces_each = True
            yield change("")
    if config.mesh.dp_replicate > 1:
        mesh = attrs.evolve(config.mesh, dp_replicate=1, dp_shard=-1)
        yield change("mesh.dp_replicate=1 mesh.dp_shard=-1", mesh=mesh)
    mesh = attrs.evolve(config.mesh, dp_shard=-1, tp=2 * config.mesh.tp)
    yield change(f"mesh.dp_shard=-1 mesh.tp={mesh.tp}", mesh=mesh)


def _swept(options: argparse.Namespace, config: Any, plan: Planner) -> Swept | None:
    """Plan the layouts of a world; None if none is valid."""
    from forgekit.plan.sweep import layouts, sweep

    specs = layouts(config, options.world, options.node_size)
    found, left_out = sweep(
        specs,
        lambda spec: plan(attrs.evolve(config, mesh=spec)),
        lambda line: tell(printable(line)),
    )
    if not found:
        reasons = Counter(one.refused for one in left_out).most_common(3)
        tell(f"none of {len(left_out)} layouts of {options.world} devices is valid:")
        for reason, count in reasons:
            tell(f"  {count} x {printable(reason)}")
        return None
    return found, left_out


def _without_machines(config: Any, folder: Path) -> Any:
    """Change what a configuration says of devices and files, where it has such keys."""
    changes: dict[str, Any] = {"out": folder / "run", "device": "cpu", "compile": False}
    if getattr(config, "activation_checkpoint", None) == "budget":  # which the compiler keeps
        changes["activation_checkpoint"] = "none"
    data = getattr(config, "data", None)
    path = getattr(data, "path", None)
    vocabulary = getattr(getattr(config, "model", None), "vocab_size", 0)
    if isinstance(path, Path) and not path.exists() and attrs.has(type(data)) and vocabulary:
        tokens = _tokens(vocabulary, getattr(data, "seq_len", 1024), folder / "tokens")
        changes["data"] = attrs.evolve(data, path=tokens)
    return attrs.evolve(config, **{k: v for k, v in changes.items() if hasattr(config, k)})


def _tokens(vocabulary: int, positions: int, path: Path) -> Path:
    """Write a small token file; what is in it changes neither memory nor time."""
    import numpy as np

    from forgekit.data.token_files import write_tokens

    if not path.exists():
        count = ROWS * positions  # and one that ends the document
        ids = np.arange(count) % max(vocabulary - 1, 1) + 1
        write_tokens(path, [ids % vocabulary], vocab_size=vocabulary, eos_id=0)
    return path


def _show(found: Plan | Swept, options: argparse.Namespace) -> None:
    from forgekit.plan.result import show_plan, show_sweep

    plans, left_out = found if isinstance(found, tuple) else ([found], [])
    if options.json:
        shown = [*(one.as_json() for one in plans), *map(attrs.asdict, left_out)]
        print(json.dumps(shown if options.sweep else shown[0], indent=1))
        return
    console = Console(highlight=False, width=140)
    if options.sweep:
        show_sweep(plans, console)
        reasons = Counter(one.refused for one in left_out)
        for reason, count in reasons.most_common():
            console.print(f"{count} x {printable(reason)}", markup=False)
    else:
        show_plan(plans[0], console)
