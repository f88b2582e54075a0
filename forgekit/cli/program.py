"""The ``forgekit`` command: recipes, their data, and their runs.

A recipe is one script and the settings beside it, meant to be copied and edited. Each command is
one function, beside its arguments; a mistake of the caller is one sentence on stderr and exit code
2, and whatever a recipe itself raises keeps its traceback. Functions import what computes when they
run, so that ``forgekit --help``, ``ls`` and ``cp`` start without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forgekit.cli.plan import add_plan
from forgekit.cli.prepare import add_prepare
from forgekit.cli.recipes import VERSION, add_recipes, recipes_folder, run
from forgekit.cli.runs import add_runs
from forgekit.cli.usage import UsageError
from forgekit.cli.verify import add_verify
from forgekit.terminal import steady_streams, tell


def main(argv: Sequence[str] | None = None, *, recipes: Path | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments, without the program. Defaults to those of the process.
        recipes: Folder of the recipes. Defaults to ``recipes_folder()``.

    Returns:
        The exit code: 0, or 2 for a mistake in the arguments. A recipe ends as it ends alone.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # All arguments after `run NAME` are the recipe's, --help included; argparse does not see them.
    count = 2 if arguments[:1] == ["run"] else len(arguments)
    with steady_streams() as (out, _):
        parser = _parser()
        options = parser.parse_args(arguments[:count])
        if options.command is None:
            parser.print_help(sys.stderr)
            return 2
        options.arguments = arguments[count:]
        options.recipes = recipes or recipes_folder()
        try:
            code = options.command(options)
        except UsageError as error:
            tell(f"forgekit: {error}")
            return 2
        out.flush()
        # A recipe's prints may be lost; the output of `ls` is its result.
        if options.command is run or out.lost is None or isinstance(out.lost, BrokenPipeError):
            return code
        tell(f"forgekit: stdout cannot be written: {out.lost.strerror}.")
        return code or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forgekit", description="Recipes for training language models, and data for them."
    )
    parser.add_argument("--version", action="version", version=f"forgekit {VERSION}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for add in (add_recipes, add_plan, add_verify, add_prepare, add_runs):
        add(commands)
    return parser
