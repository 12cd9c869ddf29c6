"""``dash-guard report runs/a``: shows what a guard has found and checked in a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dash_inductor.cli import outputs
from dash_inductor.errors import DashError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder of dash_guard.guard, or of dash-guard watch")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="also write who waits for whom, and late steps, as SVG"
    )
    parser.epilog = (
        "exit status: 0 without findings or with notes only, 1 with a suspect or a confirmed fault, 2 after an error"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..report import page, pictures, report

    outputs.check("html", arguments.html)
    outputs.check_folder("pictures", arguments.pictures)
    found = report.load(arguments.folder)
    if arguments.html is not None:
        outputs.write(arguments.html, page.html(found))
    if arguments.pictures is not None:
        try:
            pictures.write(found.findings, arguments.pictures)
        except OSError as error:
            raise DashError(f"the pictures cannot be written: {error}") from error
    shown = json.dumps(found.to_dict(), indent=2).replace("\x7f", "\\u007f") if arguments.json else report.text(found)
    print(shown, flush=True)
    return found.exit_code
