"""``forgekit ls | cp | run | verify | prepare | replay``: recipes, their data, a second look.

A recipe is one script and the settings beside it, meant to be copied and edited. Each command is
one function below; a mistake of the caller is one sentence on stderr and exit code 2, and whatever
a recipe itself raises keeps its traceback.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import hashlib
import importlib.metadata
import io
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Console
from rich.progress import Progress, TaskID

from forgekit.inputs import brief
from forgekit.terminal import printable, steady_streams, tell

if TYPE_CHECKING:
    from forgekit.data.documents.protocol import Documents
    from forgekit.mesh import MeshSpec
    from forgekit.run.replay import Replay

__all__ = ["main", "recipes_folder"]


def main(argv: Sequence[str] | None = None, *, recipes: Path | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments, without the program. Defaults to those of the process.
        recipes: Folder of the recipes. Defaults to ``recipes_folder()``.

    Returns:
        The exit code: 0, or what a recipe exits with, or 2 for a mistake in the arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # All that follows `run NAME` is the recipe's, --help included, so argparse never sees it.
    own = 2 if arguments[:1] == ["run"] else len(arguments)
    with steady_streams() as (out, _):
        options = _parse(parser, arguments[:own])
        if options.command is None:
            parser.print_help(sys.stderr)
            return 2
        options.arguments = arguments[own:]
        options.recipes = recipes or recipes_folder()
        try:
            code = options.command(options)
        except _UsageError as error:
            tell(f"forgekit: {error}")
            return 2
        out.flush()
        # What a recipe prints is beside the point; what `ls` prints is all there is.
        if options.command is _run or out.lost is None or isinstance(out.lost, BrokenPipeError):
            return code
        tell(f"forgekit: stdout cannot be written: {out.lost.strerror}.")
        return code or 1


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; what argparse says of wrong ones repeats them, so it is made printable."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options, unknown = parser.parse_known_args(arguments)
            if unknown:
                parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
            return options
    finally:
        sys.stderr.write(printable(said.getvalue()))


def _integer(text: str) -> int:
    if re.fullmatch("[+-]?[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{brief(text)} is not a whole number of at most 18 digits")


def recipes_folder() -> Path:
    """Where the recipes are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


class _UsageError(Exception):
    """A mistake in the arguments; its text is all that the user needs to see."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forgekit", description="Recipes for training language models, and data for them."
    )
    version = importlib.metadata.version("forgekit")
    parser.add_argument("--version", action="version", version=f"forgekit {version}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    ls = commands.add_parser("ls", help="list the recipes, and settings for machines")
    ls.set_defaults(command=_ls)

    cp = commands.add_parser("cp", help="copy a recipe and its settings, to edit")
    cp.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    cp.add_argument("target", metavar="TARGET", nargs="?", help="a folder or a .py file")
    cp.add_argument("--force", action="store_true", help="overwrite what is there")
    cp.set_defaults(command=_cp)

    run = commands.add_parser("run", help="run a recipe as it is; further arguments are its own")
    run.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    run.set_defaults(command=_run)

    verify = commands.add_parser(
        "verify",
        help="compare a recipe's layout with one process, in float64 on this machine",
        usage="forgekit verify [OPTIONS] RECIPE [--config FILE] [KEY=VALUE ...] [mesh.tp=2 ...]",
    )
    verify.add_argument("recipe", metavar="RECIPE", help="a .py file, or a name of `forgekit ls`")
    verify.add_argument(
        "--tolerance", metavar="E", type=float, default=1e-8, help="relative error allowed (1e-8)"
    )
    verify.add_argument(
        "--timeout", metavar="S", type=float, default=300.0, help="seconds for each run (300)"
    )
    verify.add_argument(
        "--keep-labels", action="store_true", help="mask no labels (a part is, in each batch)"
    )
    verify.add_argument(
        "--keep-split",
        action="store_true",
        help="let the gradient depend on the split into micro-batches",
    )
    verify.add_argument("settings", metavar="KEY=VALUE", nargs=argparse.REMAINDER)
    verify.set_defaults(command=_verify)

    prepare = commands.add_parser("prepare", help="make token files and a tokenizer from text")
    prepare.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="`stdlib` (Python's own sources), files and folders (text, code, .jsonl, .parquet), "
        "or hf:NAME or hf:NAME:CONFIG of a Hugging Face dataset",
    )
    prepare.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder")
    prepare.add_argument(
        "--vocab", metavar="SIZE", type=_integer, default=4096, help="size of the vocabulary (4096)"
    )
    prepare.add_argument(
        "--held-out-every",
        metavar="N",
        type=_integer,
        default=20,
        help="keep every N-th document for evaluation (20)",
    )
    prepare.add_argument(
        "--text-key", metavar="KEY", default="text", help="key of the text, or its column (text)"
    )
    prepare.add_argument(
        "--split", metavar="NAME", default="train", help="split of a Hugging Face dataset (train)"
    )
    prepare.add_argument(
        "--skip-broken", action="store_true", help="leave out what cannot be read, and count it"
    )
    prepare.add_argument(
        "--tokenizer", metavar="FILE", type=Path, help="use this tokenizer.json, train none"
    )
    prepare.add_argument(
        "--eos-token", metavar="TOKEN", default="<|endoftext|>", help="what closes a document"
    )
    prepare.set_defaults(command=_prepare)

    replay = commands.add_parser("replay", help="look at a bad step of a run again")
    replay.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    replay.add_argument(
        "--step", metavar="N", type=int, help="the step, as in metrics.jsonl (the last bad one)"
    )
    replay.add_argument(
        "--script", metavar="FILE", type=Path, help="the recipe to run; the error names the run's"
    )
    replay.set_defaults(command=_replay)
    return parser


# ls


def _ls(options: argparse.Namespace) -> int:
    shown = {**_recipes(options.recipes), **_settings(options.recipes)}
    width = max(map(len, shown))
    for name in sorted(shown):
        print(f"{name:<{width}}  {_summary(shown[name])}")
    return 0


def _recipes(folder: Path) -> dict[str, Path]:
    """The recipes by name; at least one."""
    found = {path.stem: path for path in sorted(folder.glob("*.py"))}
    if not found:
        raise _UsageError(f"there are no recipes in {folder}; is forgekit installed completely?")
    return found


def _settings(folder: Path) -> dict[str, Path]:
    """Settings of a recipe for one kind of machine by name, and a batch script by its folder."""
    found = {path.stem: path for path in folder.glob("*.toml")}
    found = {name: path for name, path in found.items() if not path.with_suffix(".py").exists()}
    return found | {path.parent.name: path for path in folder.glob("*/*.sh")}


def _summary(path: Path) -> str:
    """First line of a module's docstring, or of the comment that settings begin with."""
    if path.suffix != ".py":
        lines = path.read_text().splitlines()
        return lines[lines[0].startswith("#!")].lstrip("# ")
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]


def _recipe(folder: Path, name: str) -> Path:
    recipes = _recipes(folder)
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name, recipes, n=1)
    nearest = f"; the nearest is {close[0]!r}" if close else ""
    raise _UsageError(f"no recipe {name!r}{nearest}. There are: {', '.join(recipes)}.")


# cp


def _cp(options: argparse.Namespace) -> int:
    try:
        return _copy(options)
    except OSError as error:
        path = error.filename or options.target
        raise _UsageError(f"nothing was copied, {path}: {error.strerror}.") from None


def _copy(options: argparse.Namespace) -> int:
    recipe = _settings(options.recipes).get(options.name.removesuffix(".toml"))
    recipe = recipe or _recipe(options.recipes, options.name)
    target = _target(recipe, options.target)
    settings = recipe.with_suffix(".toml")
    first, content = b"", recipe.read_bytes()
    if content.startswith(b"#!"):  # only a first line counts as one
        first, content = content[: content.index(b"\n") + 1], content[content.index(b"\n") + 1 :]
    copies = {target: first + _stamp(recipe, target, options.name) + content}
    if settings.exists() and settings != recipe:
        copies[target.with_suffix(".toml")] = settings.read_bytes()
    there = [str(path) for path in copies if path.exists()]
    if there and not options.force:
        raise _UsageError(f"{' and '.join(there)} would be overwritten; --force does it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(copies)
    for path in copies:
        print(f"wrote {printable(path)}")
    if b"load_config" in content:
        print(f"Its settings: python {printable(shlex.quote(str(target)))} --help")
    return 0


def _replace(copies: Mapping[Path, bytes]) -> None:
    """Write files, all or none: each is complete beside its place before the first takes it."""
    with ExitStack() as stack:
        complete = {}
        for target, content in copies.items():
            path = Path(os.path.realpath(target))  # a link keeps pointing where it points
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
            complete[path] = path.with_name(f".{path.name}.{os.getpid()}")
            stack.callback(complete[path].unlink, missing_ok=True)
            complete[path].write_bytes(content)
            if path.exists():
                shutil.copymode(path, complete[path])
        for path, new in complete.items():
            new.replace(path)


def _target(recipe: Path, target: str | None) -> Path:
    """The file to write."""
    if target is None:
        return Path(recipe.name)
    path = Path(target)
    if path.is_dir() or target.endswith(os.sep):
        return path / recipe.name
    if path.suffix != recipe.suffix:
        raise _UsageError(f"{target} is neither a {recipe.suffix} file nor a folder that exists.")
    return path


def _stamp(recipe: Path, target: Path, name: str) -> bytes:
    """Comment lines that say which recipe a copy began as; the docstring below stays one."""
    version, latest = importlib.metadata.version("forgekit"), f"latest{recipe.suffix}"
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]
    return (
        f"# Copied from forgekit {version} recipes/{recipe.name} (sha256 {digest}).\n"
        f"# To compare: forgekit cp {name} {latest} && diff {latest} {target.name}\n"
    ).encode()


# run


def _run(options: argparse.Namespace) -> int:
    recipe = str(_recipe(options.recipes, options.name))
    before = sys.argv
    sys.argv = [recipe, *options.arguments]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop.code)
    finally:
        sys.argv = before
    return 0


def _exit_code(code: object) -> int:
    """What the interpreter makes of a ``SystemExit``: text goes to stderr and counts as 1."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    tell(code)
    return 1


# verify


def _verify(options: argparse.Namespace) -> int:
    from forgekit.config import load_config
    from forgekit.run.verification.result import show_report
    from forgekit.run.verification.verify import VerifyOptions, verify_setup

    path = Path(options.recipe)
    script = path if path.suffix == ".py" else _recipe(options.recipes, options.recipe)
    if not script.is_file():
        raise _UsageError(f"{script} is not there; name a recipe's file, or one of `forgekit ls`.")
    recipe = _names_of(script, "verified")
    try:
        config = load_config(recipe["Config"], options.settings, program=f"verify {script}")
    except SystemExit as stop:
        return _exit_code(stop.code)
    if not hasattr(config, "mesh"):
        raise _UsageError(f"{script} has no key mesh, so it has one layout: mesh: fk.MeshSpec.")
    console, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as out:
        settings = {**_sizes(config, options.settings), **_exact(config, out)}
        shown = {name: value for name, value in settings.items() if name != "out"}
        progress.print(
            "float64 on the CPU:",
            *(f"{name}={value}" for name, value in shown.items()),
            markup=False,
            soft_wrap=True,
        )
        try:
            chosen = VerifyOptions(
                mask=not options.keep_labels,
                split=not options.keep_split,
                tolerance=options.tolerance,
                timeout_s=options.timeout,
                progress=partial(progress.print, "[dim]...[/]"),
            )
            setup = partial(_set_up, str(script.resolve()), _tree(config, settings))
            report = verify_setup(setup, config.mesh, chosen)
        except ValueError as error:
            raise _UsageError(str(error)) from None
    show_report(report, console)
    return 0 if report.equal else 1


def _names_of(script: Path, run_name: str) -> dict[str, Any]:
    """The names of a recipe that can be set up; modules beside it are found."""
    sys.path.insert(0, str(script.resolve().parent))
    recipe = runpy.run_path(str(script), run_name=run_name)
    if missing := [name for name in ("Config", "setup") if name not in recipe]:
        raise _UsageError(
            f"{script} has no {', '.join(missing)}; a recipe that can be set up from outside has "
            "Config and setup(config), as pretrain.py does. In a script of its own: fk.verify."
        )
    return recipe


def _exact(config: Any, out: str) -> dict[str, Any]:
    """Settings under which numbers can be compared, of those that a recipe has."""
    wanted = {"out": out, "device": "cpu", "precision": "fp32", "compile": False}
    if getattr(config, "activation_checkpoint", None) == "budget":  # which the compiler keeps
        wanted["activation_checkpoint"] = "none"
    return {name: value for name, value in wanted.items() if hasattr(config, name)}


def _sizes(config: Any, settings: Sequence[str]) -> dict[str, int]:
    """Sizes of batches that a layout can share, where the user gave none and those there do not."""
    names = ("global_batch_size", "batch_size")
    given = {word.lstrip("-").partition("=")[0] for word in settings}
    if not all(hasattr(config, name) for name in names) or given & set(names):
        return {}
    mesh = config.mesh
    ranks = max(mesh.dp_replicate, 1) * max(mesh.dp_shard, 1)
    least = 2 * mesh.pp if mesh.pp > 1 else 1
    count, rest = divmod(config.global_batch_size, config.batch_size * ranks)
    if not rest and count >= least and count * ranks > 1:
        return {}
    rows = min(config.batch_size, 2)
    return {"global_batch_size": max(2, least) * rows * ranks, "batch_size": rows}


def _tree(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration as plain values, with some of them replaced."""
    from forgekit.config import to_dict

    return to_dict(config) | settings


def _set_up(script: str, tree: dict[str, Any], mesh: MeshSpec) -> Any:
    """Run a recipe's setup with another mesh; what each rank of a layout calls."""
    from forgekit.config.strict import structure

    recipe = _names_of(Path(script), "verified")
    config = structure(recipe["Config"], tree | {"mesh": attrs.asdict(mesh)})
    built = _named(recipe, recipe["setup"](config))
    if (count := _micro_batches(built, config)) is None:
        return built
    names = ("state", "loader", "loss_fn")
    found = {name: getattr(built, name) for name in names if hasattr(built, name)}
    return SimpleNamespace(**found, micro_batches=count)


def _micro_batches(built: Any, config: Any) -> int | None:
    """How many micro-batches make a step; None if the record says it, or nothing does."""
    if hasattr(built, "micro_batches"):
        return None
    count = getattr(getattr(built, "loader", None), "micro_batches", None)
    if callable(count) and hasattr(config, "global_batch_size"):
        return count(config.global_batch_size)  # pyright: ignore[reportReturnType]
    return getattr(config, "micro_batches", None)


# prepare


def _prepare(options: argparse.Namespace) -> int:
    from forgekit.data.corpus.prepare import prepare

    try:
        with _progress() as progress:
            prepared = prepare(
                _documents(options),
                options.out,
                vocab_size=options.vocab,
                held_out_every=options.held_out_every,
                progress=progress,
                tokenizer=options.tokenizer,
                eos_token=options.eos_token,
            )
    except (ValueError, OSError, ImportError) as error:
        raise _UsageError(str(error)) from None
    except KeyboardInterrupt:
        print("forgekit: interrupted; the same command goes on from here.", file=sys.stderr)
        return 1
    if not prepared.is_new:
        path = printable(prepared.path)
        print(f"{path} was made from the same files before and is left as it is.")
    for title, file in (("training", prepared.train), ("held out", prepared.held_out)):
        size = f"{file.documents:,} documents, {file.tokens:,} tokens"
        ratio = file.metadata["text_bytes"] / file.tokens
        print(f"{title}   {printable(file.path)}  {size}, {ratio:.2f} bytes per token")
    learnt = printable(prepared.path / "tokenizer.json")
    print(f"tokenizer  {learnt}  {prepared.train.vocab_size:,} tokens")
    if broken := prepared.account.broken:
        print(f"left out   {broken:,} broken documents; index.json names the first")
    return 0


def _documents(options: argparse.Namespace) -> Documents:
    from forgekit.data.documents.huggingface_datasets import huggingface_documents
    from forgekit.data.documents.text_files import stdlib_documents, text_documents

    sources: list[str] = options.sources
    if sources == ["stdlib"]:
        return stdlib_documents()
    errors = "skip" if options.skip_broken else "raise"
    named = [source for source in sources if source.startswith("hf:")]
    if not named:
        return text_documents(sources, text_key=options.text_key, errors=errors)
    if len(sources) > 1:
        raise _UsageError(
            f"{named[0]} is given beside other sources. Prepare each into a folder of its own, "
            "and mix them when training."
        )
    name, _, config = named[0].removeprefix("hf:").partition(":")
    return huggingface_documents(
        name,
        config=config or None,
        split=options.split,
        text_key=options.text_key,
        errors=errors,
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function of (stage, done, total bytes): bars on a terminal, a line per stage elsewhere."""
    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as bars:
            yield partial(_move_bar, bars, {})
    else:
        yield partial(_announce, set())


def _move_bar(bars: Progress, tasks: dict[str, TaskID], stage: str, done: int, total: int) -> None:
    if stage not in tasks:
        tasks[stage] = bars.add_task(stage, total=None)
    bars.update(tasks[stage], completed=done, total=total or None)


def _announce(stages: set[str], stage: str, _: int, total: int) -> None:
    if stage not in stages:
        stages.add(stage)
        size = f"{total / 1e6:.1f} MB of text" if total else "text"
        print(f"{stage}: reading {size}", file=sys.stderr, flush=True)


# replay


def _replay(options: argparse.Namespace) -> int:
    from forgekit.run.bad_step_records import read_bad_steps
    from forgekit.run.durable_files import write_atomic
    from forgekit.run.strict_json import finite

    if options.step is not None and options.step < 1:
        raise _UsageError(f"--step {options.step}: steps are counted from 1, as in metrics.jsonl.")
    known = {bad["step"]: bad for bad in read_bad_steps(options.run)}
    step = options.step if options.step is not None else max(known, default=None)
    if step is None:
        raise _UsageError(
            f"{options.run} has no bad_steps.jsonl, so no step had to be left out. "
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
        raise _UsageError(f"--step {step}: {run} has logged no step after {last}; choose that one.")


def _compute_again(options: argparse.Namespace, step: int, bad: dict[str, Any]) -> Replay:
    """Go from the last checkpoint to the step before, and look at the step."""
    from forgekit.data.loading.groups import groups
    from forgekit.run.replay import replay_step

    recipe, config = _configured(options, bad)
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _link_checkpoints(options.run, before=step, out=out)
        built = _named(recipe, recipe["setup"](attrs.evolve(config, out=out)))
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


def _named(recipe: dict[str, Any], built: Any) -> Any:
    """What ``setup`` returned, by name; copies of older recipes return a tuple."""
    if type(built) is not tuple:
        return built
    names = ("state", "step", "loader")
    return SimpleNamespace(**dict(zip(names, built, strict=False)), loss_fn=recipe["loss_fn"])


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
        raise _UsageError(_ask_for_script(options, bad.get("script")))
    if not script.is_file():
        raise _UsageError(f"the recipe {script} is not there; --script FILE names it.")
    recipe = runpy.run_path(str(script), run_name="replayed")
    if missing := [name for name in ("Config", "setup", "loss_fn") if name not in recipe]:
        raise _UsageError(
            f"{script} has no {', '.join(missing)}; a recipe that can be replayed has Config, "
            "setup(config) and loss_fn, as pretrain.py does."
        )
    path = options.run / "config.json"
    try:
        tree = json.loads(path.read_text("utf-8")) | {"mesh": {}}
        return recipe, structure(recipe["Config"], tree)
    except (OSError, ValueError, ConfigError) as error:
        raise _UsageError(f"{path} does not fit {script}: {error}") from None
