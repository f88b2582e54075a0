"""``forgekit report``: runs as one HTML page."""

from __future__ import annotations

import argparse
from typing import Any

from forgekit.cli.usage import UsageError, file_path
from forgekit.terminal import printable


def add_report(commands: Any) -> None:
    """Declare ``forgekit report`` and its arguments."""
    report = commands.add_parser("report", help="show runs as one HTML page that opens anywhere")
    runs = "run directories, or metrics.jsonl files alone; several are drawn over each other"
    report.add_argument("runs", metavar="RUN", nargs="+", type=file_path, help=runs)
    page = "the page (report.html in the run directory; of several runs in this one)"
    report.add_argument("--out", metavar="PAGE", type=file_path, help=page)
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    from forgekit.report import write_report

    try:
        page = write_report(options.runs, options.out)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"no page was written: {error}. Name one with --out.") from None
    print(f"page      {printable(page)}  {page.stat().st_size / 1e3:,.0f} kB")
    return 0
