"""``forgekit report``: runs as one HTML page, and as pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forgekit.cli.usage import UsageError, file_path
from forgekit.terminal import printable


def add_report(commands: Any) -> None:
    """Declare ``forgekit report`` and its arguments."""
    report = commands.add_parser("report", help="show runs as one HTML page that opens anywhere")
    option = report.add_argument
    runs = "run directories, or metrics.jsonl files alone; several are drawn over each other"
    option("runs", metavar="RUN", nargs="+", type=file_path, help=runs)
    page = "the page (report.html in the run directory; of several runs in this one)"
    option("--out", metavar="PAGE", type=file_path, help=page)
    option("--no-png", action="store_true", help="the page alone, no PNG files of its charts")
    option("--watch", action="store_true", help="write it again until the runs have ended, no PNG")
    seconds = "with --watch: seconds between two looks (10)"
    option("--every", metavar="SECONDS", type=_seconds, default=10.0, help=seconds)
    report.set_defaults(command=_report)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return seconds


def _report(options: argparse.Namespace) -> int:
    from forgekit.run.reporting.write import watch, write_report

    try:
        if options.watch:
            watch(options.runs, options.out, every_s=options.every, told=_tell_page)
            return 0
        written = write_report(options.runs, options.out, pictures=not options.no_png)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"no page was written: {error}. Name one with --out.") from None
    except KeyboardInterrupt:
        return 0  # the page is whole: it is replaced in one go
    _tell_page(written.page)
    if written.pictures:
        folder = printable(written.pictures[0].parent)
        print(f"pictures  {folder}  {len(written.pictures)} PNG files")
    if written.note:
        print(printable(written.note))
    return 0


def _tell_page(page: Path) -> None:
    print(f"page      {printable(page)}  {page.stat().st_size / 1e3:,.0f} kB", flush=True)
