"""``forgekit plan``: a recipe's memory, collectives and time on machines that are not here."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

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
LONG = 16_384
"""Positions of a row from which a sweep tries context parallelism."""
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
    limit = "what tensors may take of a device (92%% of its memory)"
    option("--memory", metavar="GIB", type=float, help=limit)
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


def _limit(options: argparse.Namespace) -> float:
    """Bytes that tensors may have on a device."""
    from forgekit.run.machines import MACHINES
    from forgekit.run.plan.estimate import USABLE

    given = options.memory
    return USABLE * MACHINES[options.device].memory_bytes if given is None else given * 2**30


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
    from forgekit.steps.linear_cross_entropy import LOGITS

    pp, *_ = resolve_sizes(config.mesh, options.world)
    here = _without_machines(config, folder)
    job = Job(
        setup=lambda: _complete(recipe, recipe["setup"](here)),
        micro_batches=partial(_micro_batches, here),
        world=options.world,
        pp=pp,
        schedule=getattr(config, "pipeline_schedule", "1f1b"),
        device=options.device,
        node_size=options.node_size,
    )
    # A CPU takes smaller chunks of logits, which is more traffic and less memory.
    with mock.patch("forgekit.steps.linear_cross_entropy.LOGITS_ON_CPU", LOGITS):
        plan = plan_step(job)
    return attrs.evolve(plan, fits=plan.peak <= _limit(options))


def _complete(recipe: dict[str, Any], built: Any) -> Any:
    """What ``setup`` returned, by name, with all that a step takes."""
    built = named({"loss_fn": None} | recipe, built)
    wanted = ("state", "step", "loader", "loss_fn")
    if missing := [name for name in wanted if getattr(built, name, None) is None]:
        raise UsageError(
            f"setup returned a {type(built).__name__} without {', '.join(missing)}; a plan takes a "
            "step with them: return fk.Setup(state=..., step=..., loader=..., loss_fn=...)."
        )
    return built


def _fitting(config: Any, plan: Callable[[Any], Plan], name: str) -> Plan | None:
    """Plan a configuration and, if it does not fit, what could be changed; None after an error."""
    from forgekit.run.plan.stand_ins import PlanError

    try:
        found = plan(config)
    except (UsageError, PlanError):
        raise
    except Exception as error:
        tell(f"{printable(name)} would end with {type(error).__name__}: {printable(str(error))}")
        return None
    return found if found.fits else attrs.evolve(found, remedies=_remedies(config, plan))


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


@attrs.frozen
class Refused:
    """A layout of a sweep that does not run, or need not be planned.

    Attributes:
        layout: Its sizes.
        refused: Why.
    """

    layout: dict[str, int]
    refused: str


def _swept(
    options: argparse.Namespace, config: Any, plan: Callable[[Any], Plan]
) -> tuple[list[Plan], list[Refused]] | None:
    """Plan layouts; those that fit first, by estimated time. None if none is valid.

    What is larger in pp * tp * cp communicates more: two sizes in a row that bring nothing faster
    than a smaller one that fits end the sweep.
    """
    found: list[Plan] = []
    refused: list[Refused] = []
    behind = 0
    by_size = itertools.groupby(layouts(config, options.world, options.node_size), _model_ranks)
    for size, specs in by_size:
        if behind == 2:
            tell(f"pp * tp * cp from {size}: left out, as the two sizes before are no faster.")
            break
        best = min(map(_rank_of, found), default=None)
        _plan_size(list(specs), config, plan, found, refused)
        is_behind = best is not None and not best[0] and min(map(_rank_of, found)) == best
        behind = behind + 1 if is_behind else 0
    if not found:
        reasons = Counter(one.refused for one in refused).most_common(3)
        tell(f"none of {len(refused)} layouts of {options.world} devices is valid:")
        for reason, count in reasons:
            tell(f"  {count} x {printable(reason)}")
        return None
    return sorted(found, key=_rank_of), refused


def _plan_size(
    specs: list[MeshSpec],
    config: Any,
    plan: Callable[[Any], Plan],
    found: list[Plan],
    refused: list[Refused],
) -> None:
    """Plan layouts of one size and add them, those with the most shards first."""
    full: dict[MeshSpec, str] = {}
    for spec in specs:
        sizes = {name: size for name, size in attrs.asdict(spec).items() if size > 1}
        shown = " ".join(f"{name}={size}" for name, size in sizes.items()) or "one device"
        apart = attrs.evolve(spec, dp_replicate=1, dp_shard=1)
        try:
            if apart in full:
                raise ValueError(f"does not fit, as {full[apart]} with more shards does not")
            one = plan(attrs.evolve(config, mesh=spec))
        except Exception as error:
            refused.append(Refused(attrs.asdict(spec), f"{type(error).__name__}: {error}"))
            tell(printable(f"{shown}: {refused[-1].refused}"))
            continue
        found.append(one)
        if not one.fits:
            full[apart] = shown
        tell(f"{shown}: {one.step_seconds:.3f} s" + ("" if one.fits else ", does not fit"))


def _rank_of(plan: Plan) -> tuple[bool, float]:
    """Order of a sweep: what fits, by the time of a target; steps may differ in their targets."""
    return not plan.fits, -plan.tokens_per_second_per_device


def _model_ranks(spec: MeshSpec) -> int:
    return spec.pp * spec.tp * spec.cp


def layouts(config: Any, world: int, node_size: int) -> list[MeshSpec]:
    """Find the layouts of a sweep, in powers of two: the fewest ranks per copy of a row first.

    Tensor parallelism stays inside a node. Context parallelism is tried for sequences from
    ``LONG`` positions, and where it is configured; expert parallelism where there are experts.
    Parameters are sharded over all data ranks, over those of a node, or not at all.

    Args:
        config: A recipe's, with ``mesh``.
        world: Number of ranks.
        node_size: Ranks of a node.

    Returns:
        The layouts, by ``pp * tp * cp``, then the most shards first.
    """
    from forgekit.mesh import MeshSpec

    given = config.mesh
    model, data = getattr(config, "model", None), getattr(config, "data", config)
    experts = getattr(getattr(model, "moe", None), "experts", 1)
    length = getattr(data, "seq_len", getattr(config, "seq_len", 0))
    powers = [2**n for n in range(4)]
    contexts = powers if given.cp > 1 or length >= LONG else [1]
    shares = [n for n in powers if experts % n == 0] if experts > 1 else [given.ep]
    found: set[MeshSpec] = set()
    for pp, tp, cp, ep in itertools.product(powers, powers, contexts, shares):
        model_ranks = pp * tp * cp
        if tp > node_size or world % model_ranks:
            continue
        ranks = world // model_ranks
        for shards in {ranks, min(ranks, max(1, node_size // (tp * cp))), 1}:
            if ranks % shards == 0 and shards * cp % ep == 0:
                sizes = {"pp": pp, "tp": tp, "cp": cp, "ep": ep}
                found.add(MeshSpec(**sizes, dp_replicate=ranks // shards, dp_shard=shards))
    return sorted(found, key=lambda one: (_model_ranks(one), one.pp, one.cp, one.ep, -one.dp_shard))


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

    from forgekit.data.corpus.token_files import write_tokens

    if not path.exists():
        count = ROWS * positions  # and one that ends the document
        ids = np.arange(count) % max(vocabulary - 1, 1) + 1
        write_tokens(path, [ids % vocabulary], vocab_size=vocabulary, eos_id=0)
    return path


def _micro_batches(config: Any, built: Any) -> int:
    """Count the micro-batches of a step, by whatever the recipe says of them."""
    count = getattr(built.loader, "micro_batches", None)
    if callable(count) and hasattr(config, "global_batch_size"):
        return count(config.global_batch_size)  # pyright: ignore[reportReturnType]
    return getattr(built, "micro_batches", None) or getattr(config, "micro_batches", 1)


def _show(found: Plan | tuple[list[Plan], list[Refused]], options: argparse.Namespace) -> None:
    from forgekit.run.plan.result import show_plan, show_sweep

    plans, refused = found if isinstance(found, tuple) else ([found], [])
    if options.json:
        shown = [*(one.as_json() for one in plans), *map(attrs.asdict, refused)]
        print(json.dumps(shown if options.sweep else shown[0], indent=1))
        return
    console = Console(highlight=False, width=140)
    if options.sweep:
        show_sweep(plans, console)
        reasons = Counter(one.refused for one in refused)
        for reason, count in reasons.most_common():
            console.print(f"{count} not planned or not valid: {printable(reason)}", markup=False)
    else:
        show_plan(plans[0], console, _limit(options))
