"""``forgekit replay``: a bad step of a run, looked at again."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from forgekit.cli.recipe_setup import build, micro_batches, opened
from forgekit.cli.usage import UsageError, file_path, script_file
from forgekit.files import read_regular
from forgekit.inputs import parse_json
from forgekit.terminal import printable

if TYPE_CHECKING:
    from forgekit.evaluation.replay import Replay
    from forgekit.state import TrainState


def add_replay(commands: Any) -> None:
    """Declare ``forgekit replay`` and its arguments."""
    replay = commands.add_parser("replay", help="look at a bad step of a run again")
    option = replay.add_argument
    option("run", metavar="RUN", type=file_path, help="a run directory")
    option("--step", metavar="N", type=int, help="as in metrics.jsonl (the last bad one)")
    script = "the recipe to run; the error names the run's"
    option("--script", metavar="FILE", type=file_path, help=script)
    replay.set_defaults(command=_replay)


def _replay(options: argparse.Namespace) -> int:
    from forgekit.files import write_atomic
    from forgekit.metrics.records import finite

    if options.step is not None and options.step < 1:
        raise UsageError(f"--step {options.step}: steps are counted from 1, as in metrics.jsonl.")
    if not options.run.is_dir():
        raise UsageError(f"{options.run} is no run directory. Name what a recipe's out= was.")
    known = {bad["step"]: bad for bad in _rows(options.run / "bad_steps.jsonl")}
    step = options.step if options.step is not None else max(known, default=None)
    if step is None:
        raise UsageError(
            f"{options.run} has no bad_steps.jsonl: the run has no bad steps. "
            "--step N looks at another one."
        )
    logged = [row["step"] for row in _rows(options.run / "metrics.jsonl")]
    if step > (last := max([*logged, *known], default=0)):  # replaying it would be training
        raise UsageError(
            f"--step {step}: {options.run} has logged no step after {last}; choose that one."
        )
    found = finite(attrs.asdict(_compute_again(options, step, known.get(step, {}))))
    path = options.run / f"replay_step_{step}.json"
    write_atomic(path, f"{json.dumps(found, indent=1)}\n".encode())
    for name, value in found.items():
        print(printable(f"{name:<20}  {value}"))
    print(f"written to {printable(path)}")
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of a run; there may be none."""
    from forgekit.run import read_metrics

    try:
        rows = read_metrics(path) if path.is_file() else []
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if wrong := [row["step"] for row in rows if not isinstance(row["step"], int)]:
        raise UsageError(f"{path} has the step {wrong[0]!r}. Repair or delete that line.")
    return rows


def _compute_again(options: argparse.Namespace, step: int, bad: dict[str, Any]) -> Replay:
    """Go from the last checkpoint to the step before, and look at the step."""
    from forgekit.data.groups import groups
    from forgekit.evaluation.replay import replay_step
    from forgekit.mesh import shutdown

    if options.script is None:
        raise UsageError(_ask_for_script(options, bad.get("script")))
    script = script_file(options.script, "--script FILE names the recipe.")
    with opened(script) as recipe, ExitStack() as stack:
        stack.callback(shutdown)
        config = _configured(options.run, recipe)
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _link_checkpoints(options.run, before=step, out=out)
        try:
            built = build(recipe, attrs.evolve(config, out=out))
        except SystemExit as stop:
            raise UsageError(f"setup of {script} called sys.exit({stop.code!r}).") from None
        state, take, loader = built.state, built.step, built.loader
        for part in (loader, getattr(built, "stop", None)):
            if hasattr(part, "__exit__"):
                stack.enter_context(part)  # pyright: ignore[reportArgumentType]
        _skip(loader, state, bad.get("skips", state.skips), script)
        batches = groups(loader, micro_batches(built, config))
        while state.step < step - 1:
            state, _ = take(state, next(batches))
        return replay_step(state, next(batches), built.loss_fn)


def _skip(loader: Any, state: TrainState, skips: Any, script: Path) -> None:
    """Leave out what the run had left out by then; a generator begins where ``setup`` began it."""
    if hasattr(loader, "seek"):
        loader.seek(state.samples, skip=skips)
    elif [*map(tuple, skips)] != [*map(tuple, state.skips)]:
        raise UsageError(
            f"the step came after a way back, without the samples {skips}, and the loader of "
            f"{script} cannot leave them out: give it seek(start, skip), as fk.train_loader has."
        )


def _ask_for_script(options: argparse.Namespace, noted: object) -> str:
    """Say what to type: a run directory may come from anywhere, so it does not choose the code."""
    step = [] if options.step is None else ["--step", str(options.step)]
    file = noted if isinstance(noted, str) and noted else "FILE"
    command = shlex.join(["forgekit", "replay", str(options.run), *step, "--script", file])
    source = "which this run has not noted" if file == "FILE" else "here the one that the run noted"
    return f"replay runs the code of the recipe, so it has to be named ({source}): {command}"


def _link_checkpoints(run: Path, *, before: int, out: Path) -> None:
    """Let a run directory seem to have no checkpoint of a step, or of later ones."""
    from forgekit.checkpoints.directory import committed, storage_of

    (out / "checkpoints").mkdir()
    storage = storage_of(run / "checkpoints")
    for step in committed(storage):
        if step < before:
            path = Path(storage.path(step))
            (out / "checkpoints" / path.name).symlink_to(path.resolve())


def _configured(run: Path, recipe: ModuleType) -> Any:
    """The run's configuration, for one process."""
    from forgekit.config import ConfigError, structure

    path = run / "config.json"
    try:
        tree = parse_json(read_regular(path))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}")
        return structure(recipe.Config, tree | ({"mesh": {}} if "mesh" in tree else {}))
    except (OSError, ValueError, ConfigError) as error:
        raise UsageError(f"{path} does not fit {recipe.__file__}: {error}") from None
