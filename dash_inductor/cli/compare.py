"""``dash-inductor compare runs/a runs/b``: the first step, rank and tensor in which two recorded runs differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..divergence.compare import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="a folder that dash_inductor.record has filled")
    parser.add_argument("b", type=Path, help="another one")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page about the result")
    parser.epilog = "exit status: 0 equal, 1 diverged, 2 not comparable"


def run(arguments: argparse.Namespace) -> int:
    from ..divergence.compare import compare

    return show(compare(arguments.a, arguments.b), arguments)


def show(result: Comparison, arguments: argparse.Namespace) -> int:
    """Print a comparison, write its page, and return its exit status."""
    from ..divergence import page, report

    if arguments.html is not None:
        arguments.html.write_text(page.html(result), encoding="utf-8")
    print(json.dumps(result.to_dict(), indent=2) if arguments.json else report.text(result))
    return result.exit_code
