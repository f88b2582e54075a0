"""``forgekit replay``: a bad step of a run, looked at again."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forgekit.cli.recipe_files import named, names_of
from forgekit.cli.usage import UsageError, file_path, script_file
from forgekit.terminal import printable

if TYPE_CHECKING:
    from forgekit.run.replay import Replay


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
    from forgekit.run.bad_step_records import read_bad_steps
    from forgekit.run.strict_json import finite

    if options.step is not None and options.step < 1:
        raise UsageError(f"--step {options.step}: steps are counted from 1, as in metrics.jsonl.")
    if not options.run.is_dir():
        raise UsageError(f"{options.run} is no run directory. Name what a recipe's out= was.")
    known = {bad["step"]: bad for bad in read_bad_steps(options.run)}
    step = options.step if options.step is not None else max(known, default=None)
    if step is None:
        raise UsageError(
            f"{options.run} has no bad_steps.jsonl: the run has no bad steps. "
            "--step N looks at another one."
        )
    _check_logged(options.run, step, known)
    found = finite(attrs.asdict(_compute_again(options, step, known.get(step, {}))))
    path = options.run / f"replay_step_{step}.json"
    write_atomic(path, f"{json.dumps(found, indent=1)}\n".encode())
    for name, value in found.items():
        print(printable(f"{name:<20}  {value}"))
    print(f"written to {printable(path)}")
    return 0


def _check_logged(run: Path, step: int, known: Iterable[int]) -> None:
    """Refuse a step that the run has not come to: replaying it would be training."""
    from forgekit.run.metrics import read_metrics

    path = run / "metrics.jsonl"
    logged = [row["step"] for row in read_metrics(path)] if path.exists() else []
    if step > (last := max([*logged, *known], default=0)):
        raise UsageError(f"--step {step}: {run} has logged no step after {last}; choose that one.")


def _compute_again(options: argparse.Namespace, step: int, bad: dict[str, Any]) -> Replay:
    """Go from the last checkpoint to the step before, and look at the step."""
    from forgekit.data.loading.groups import groups
    from forgekit.run.replay import replay_step

    recipe, config = _configured(options, bad)
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _link_checkpoints(options.run, before=step, out=out)
        built = named(recipe, recipe["setup"](attrs.evolve(config, out=out)))
        state, take, loader = built.state, built.step, built.loader
        parts: list[Any] = [loader, getattr(built, "stop", None)]
        for part in parts:
            if hasattr(part, "__exit__"):
                stack.enter_context(part)
        loader.seek(state.samples, skip=bad.get("skips", state.skips))
        batches = groups(loader, loader.micro_batches(config.global_batch_size))
        while state.step < step - 1:
            state, _ = take(state, next(batches))
        return replay_step(state, next(batches), built.loss_fn)


def _ask_for_script(options: argparse.Namespace, noted: object) -> str:
    """Say what to type: a run directory may come from anywhere, so it does not choose the code."""
    step = [] if options.step is None else ["--step", str(options.step)]
    file = noted if isinstance(noted, str) and noted else "FILE"
    command = shlex.join(["forgekit", "replay", str(options.run), *step, "--script", file])
    source = "which this run has not noted" if file == "FILE" else "here the one that the run noted"
    return f"replay runs the code of the recipe, so it has to be named ({source}): {command}"


def _link_checkpoints(run: Path, *, before: int, out: Path) -> None:
    """Let a run directory seem to have no checkpoint of a step, or of later ones."""
    from forgekit.run.checkpoints.storage import committed, storage_of

    (out / "checkpoints").mkdir()
    for step, path in committed(storage_of(run / "checkpoints")).items():
        if step < before:
            (out / "checkpoints" / path.name).symlink_to(path.resolve())


def _configured(options: argparse.Namespace, bad: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The names of a recipe, and the run's configuration for one process."""
    from forgekit.config import ConfigError
    from forgekit.config.strict import structure

    script = options.script
    if script is None:
        raise UsageError(_ask_for_script(options, bad.get("script")))
    script_file(script, "--script FILE names the recipe.")
    recipe = names_of(script, "Config", "setup", "loss_fn")
    path = options.run / "config.json"
    try:
        tree = json.loads(path.read_text("utf-8")) | {"mesh": {}}
        return recipe, structure(recipe["Config"], tree)
    except (OSError, ValueError, ConfigError) as error:
        raise UsageError(f"{path} does not fit {script}: {error}") from None
