"""``forgekit replay | export | report | doctor``: commands on a run directory."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from forgekit.checks import parse_json
from forgekit.cli.recipe_setup import build, micro_batches, opened
from forgekit.cli.usage import UsageError, file_path, location, script_file
from forgekit.files import read_regular, write_atomic
from forgekit.remote.urls import UrlError, is_url

if TYPE_CHECKING:
    from forgekit.evaluation.replay import Replay


def add_runs(commands: Any) -> None:
    """Declare the commands and their arguments."""
    replay = commands.add_parser("replay", help="recompute a bad step of a run")
    option = replay.add_argument
    option("run", metavar="RUN", type=file_path, help="a run directory")
    option("--step", metavar="N", type=int, help="as in metrics.jsonl (the last bad one)")
    script = "the recipe to run; the error names the run's"
    option("--script", metavar="FILE", type=file_path, help=script)
    replay.set_defaults(command=_replay)
    export = commands.add_parser("export", help="write a run's model as a Hugging Face directory")
    option = export.add_argument
    option("run", metavar="RUN", type=location, help="a run directory, or its URL")
    option("directory", metavar="DIR", type=file_path, help="the new directory")
    option("--step", metavar="N", type=int, help="of this checkpoint (the newest)")
    option("--like", metavar="MODEL", help="a family, such as mistral, or a directory (its base)")
    option("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (as is)")
    option("--tokenizer", metavar="PATH", type=file_path, help="a tokenizer.json (the run's)")
    export.set_defaults(command=_export)
    report = commands.add_parser("report", help="show a run as one HTML page that opens anywhere")
    run = "a run directory or its URL, or a metrics.jsonl file"
    report.add_argument("run", metavar="RUN", type=location, help=run)
    page = "the page (report.html in the run directory; of a URL in this one)"
    report.add_argument("--out", metavar="PAGE", type=file_path, help=page)
    report.set_defaults(command=_report)
    doctor = commands.add_parser("doctor", help="check a run directory, and the ranks of a job")
    where = "a run directory, or where it is to be (this folder)"
    doctor.add_argument("out", metavar="OUT", nargs="?", type=file_path, default=".", help=where)
    doctor.set_defaults(command=_doctor)


def _export(options: argparse.Namespace) -> int:
    import torch

    from forgekit.huggingface.save import save_huggingface
    from forgekit.lora.adapters import merge_lora
    from forgekit.model.lora import lora_layers
    from forgekit.ranks import CheckpointError
    from forgekit.run.load_run import read_model, read_run_config, run_tokenizer

    try:
        config = read_run_config(options.run)
        like = options.like or config.get("base")
        tokenizer = options.tokenizer or run_tokenizer(config)
        dtype = None if options.dtype is None else getattr(torch, options.dtype)
        model, step = read_model(options.run, config, options.step)
        if lora_layers(model):
            merge_lora(model)
        save_huggingface(model, options.directory, tokenizer, like, dtype=dtype)
    except (CheckpointError, ValueError) as error:
        raise UsageError(str(error)) from None
    print(f"step       {step}")
    print(f"tokenizer  {getattr(tokenizer, 'name_or_path', tokenizer) or like or 'none'}")
    print(f"written to {options.directory}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from forgekit.report import write_report
    from forgekit.run.mirror import local_copy

    out = options.out
    if out is None and is_url(options.run):
        out = Path("report.html")
    try:
        with local_copy(options.run) as run:
            page = write_report(run, out)
    except (ValueError, UrlError) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"no page was written: {error}. Choose its file with --out.") from None
    print(f"page      {page}  {page.stat().st_size / 1e3:,.0f} kB")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from forgekit.doctor import sections

    outcomes = []
    for title, checks in sections(Path(options.out)):
        print(f"\n{title}")
        for check in checks:
            outcomes.append(check.outcome)
            print(f"  {check.outcome:<4}  {check.name:<18} {check.text}", flush=True)
    bad = outcomes.count("BAD")
    if outcomes:  # so this is the first rank
        print(f"\n{bad} problem{'s' * (bad > 1)} to fix before a run" if bad else "\nready")
    return 1 if bad else 0


def _replay(options: argparse.Namespace) -> int:
    from forgekit.metrics.records import finite

    if not options.run.is_dir():
        raise UsageError(f"{options.run} is not a run directory; pass the recipe's out=.")
    bad_steps = {row["step"]: row for row in _rows(options.run / "bad_steps.jsonl")}
    step = options.step if options.step is not None else max(bad_steps, default=None)
    if step is None:
        raise UsageError(
            f"{options.run} has no bad_steps.jsonl: the run has no bad steps. "
            "--step N replays another step."
        )
    logged = [row["step"] for row in _rows(options.run / "metrics.jsonl")]
    last = max([*logged, *bad_steps], default=0)
    if not 1 <= step <= last:  # replaying a later step would be training
        raise UsageError(f"--step {step}: {options.run} has logged steps from 1 to {last}.")
    replayed = finite(attrs.asdict(_compute_again(options, step, bad_steps.get(step, {}))))
    path = options.run / f"replay_step_{step}.json"
    write_atomic(path, f"{json.dumps(replayed, indent=1)}\n".encode())
    for name, value in replayed.items():
        print(f"{name:<20}  {value}")
    print(f"written to {path}")
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's file, which may not exist."""
    from forgekit.metrics import read_metrics

    try:
        return read_metrics(path) if path.is_file() else []
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def _compute_again(options: argparse.Namespace, step: int, bad: dict[str, Any]) -> Replay:
    """Train from the last checkpoint to the step before, and replay the step."""
    from forgekit.data.groups import groups
    from forgekit.evaluation.replay import replay_step
    from forgekit.mesh import shutdown

    if options.script is None:  # a run directory may come from anywhere, so it must not choose code
        noted = f" (the run noted {bad['script']})" if bad.get("script") else ""
        raise UsageError(f"replay runs a recipe's code: pass it with --script FILE{noted}.")
    script = script_file(options.script, "--script FILE names the recipe.")
    with opened(script) as recipe, ExitStack() as stack:
        stack.callback(shutdown)
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = _config_of(options.run, recipe)
        _link_checkpoints(options.run, before=step, out=out)
        try:
            built = build(recipe, attrs.evolve(config, out=out))
        except SystemExit as stop:
            raise UsageError(f"setup of {script} called sys.exit({stop.code!r}).") from None
        state, loader = built.state, built.loader
        for part in (loader, getattr(built, "stop", None)):
            if hasattr(part, "__exit__"):
                stack.enter_context(part)  # pyright: ignore[reportArgumentType]
        skips = bad.get("skips", state.skips)
        if hasattr(loader, "seek"):
            loader.seek(state.samples, skip=skips)
        elif [*map(tuple, skips)] != [*map(tuple, state.skips)]:  # the generator has started
            raise UsageError(
                f"the run skipped the samples {skips} before this step, but the loader of "
                f"{script} cannot: give it seek(start, skip), as fk.train_loader has."
            )
        batches = groups(loader, micro_batches(built, config))
        while state.step < step - 1:
            state, _ = built.step(state, next(batches))
        return replay_step(state, next(batches), built.loss_fn)


def _link_checkpoints(run: Path, *, before: int, out: Path) -> None:
    """Link a run's checkpoints before a step into another directory."""
    from forgekit.checkpoints.directory import committed, storage_of

    (out / "checkpoints").mkdir()
    storage = storage_of(run / "checkpoints")
    for step, _ in committed(storage):
        if step < before:
            path = Path(storage.path(step))
            (out / "checkpoints" / path.name).symlink_to(path.resolve())


def _config_of(run: Path, recipe: ModuleType) -> Any:
    """Build the run's configuration for one process."""
    from forgekit.config import structure

    path = run / "config.json"
    try:
        tree = parse_json(read_regular(path))
        if not isinstance(tree, dict):
            raise ValueError(f"it contains a {type(tree).__name__}")
        return structure(recipe.Config, tree | ({"mesh": {}} if "mesh" in tree else {}))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} does not fit {recipe.__file__}: {error}") from None
