"""``forgekit``: recipes, copies of them, data for them, and what they make.

A recipe is one script and the settings beside it, meant to be copied and edited. Each command is
one function, beside its arguments; a mistake of the caller is one sentence on stderr and exit code
2, and whatever a recipe itself raises keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

from forgekit.cli.diff_command import add_diff
from forgekit.cli.doctor_command import add_doctor
from forgekit.cli.export_command import add_export
from forgekit.cli.plan_command import add_plan
from forgekit.cli.prepare_command import add_prepare
from forgekit.cli.recipe_commands import add_cp, add_ls, add_run, run
from forgekit.cli.recipe_files import recipes_folder
from forgekit.cli.replay_command import add_replay
from forgekit.cli.report_command import add_report
from forgekit.cli.usage import UsageError
from forgekit.cli.verify_command import add_verify
from forgekit.terminal import printable, steady_streams, tell


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
        except UsageError as error:
            tell(f"forgekit: {error}")
            return 2
        out.flush()
        # What a recipe prints is beside the point; what `ls` prints is all there is.
        if options.command is run or out.lost is None or isinstance(out.lost, BrokenPipeError):
            return code
        tell(f"forgekit: stdout cannot be written: {out.lost.strerror}.")
        return code or 1


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; an error of argparse repeats wrong ones, so its text is made printable."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            options, unknown = parser.parse_known_args(arguments)
            if unknown:
                parser.error(f"unrecognized arguments: {shlex.join(unknown)}")
            return options
    finally:
        sys.stderr.write(printable(said.getvalue()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forgekit", description="Recipes for training language models, and data for them."
    )
    version = importlib.metadata.version("forgekit")
    parser.add_argument("--version", action="version", version=f"forgekit {version}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    recipes = (add_ls, add_cp, add_diff, add_run, add_plan, add_verify, add_replay)
    for add in (*recipes, add_prepare, add_export, add_report, add_doctor):
        add(commands)
    return parser
