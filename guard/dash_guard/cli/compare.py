"""``dash-guard compare runs/a runs/b``: finds the first step, rank and tensor in which two recorded runs differ."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dash_inductor.cli import outputs
from dash_inductor.cli.command import drop_output
from dash_inductor.errors import DashError

if TYPE_CHECKING:
    from ..recordings.compare import Comparison
    from ..recordings.layouts import LayoutComparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, help="a folder that dash_guard.record has filled")
    parser.add_argument("b", type=Path, help="another one")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page about the result")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write the result as a test case for CI (JUnit)"
    )
    parser.add_argument(
        "--layouts",
        action="store_true",
        help="the runs have other micro-batches, ranks or compilers: compare the values that `record --values` writes",
    )
    parser.epilog = (
        "exit status: 0 equal (--layouts: within rounding), 1 diverged (beyond rounding), 2 not comparable, or an error"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..recordings.compare import compare

    outputs.check("html", arguments.html)
    outputs.check("junit", arguments.junit)
    subject = f"{arguments.a} and {arguments.b}"
    result: Comparison | LayoutComparison
    with errors_in_junit(arguments, subject):
        if arguments.layouts:
            from ..recordings.layouts import compare_layouts

            result = compare_layouts(arguments.a, arguments.b)
        else:
            result = compare(arguments.a, arguments.b)
    return show(result, arguments, subject)


@contextlib.contextmanager
def errors_in_junit(arguments: argparse.Namespace, subject: str) -> Iterator[None]:
    """Writes an error of the work within as a test case, too, if that was asked for: no earlier file stays.

    Args:
        arguments, subject: as for `show`.
    """
    from ..recordings import junit

    try:
        yield
    except DashError as error:
        if arguments.junit is not None:
            outputs.write(arguments.junit, junit.error(str(error), arguments.command, subject))
        raise


def show(result: Comparison | LayoutComparison, arguments: argparse.Namespace, subject: str) -> int:
    """Print a comparison, write the files about it that were asked for, and return its exit status.

    Args:
        result: the comparison.
        arguments: those of the command line, `html` and `junit` among them.
        subject: what was compared, the name of the test case in `junit`.

    Raises:
        DashError: the page or the output cannot be written.
        BrokenPipeError: nobody reads the output.
    """
    from ..recordings import junit, layout_page, page, report
    from ..recordings.compare import Comparison

    if arguments.html is not None:
        if isinstance(result, Comparison):
            shown = page.html(result, _measured(result))
        else:
            shown = layout_page.html(result, _losses(result))
        outputs.write(arguments.html, shown)
    if arguments.junit is not None:
        outputs.write(arguments.junit, junit.xml(result, arguments.command, subject))
    width = outputs.columns()
    text = report.text(result, width) if isinstance(result, Comparison) else report.text_of_layouts(result, width)
    try:
        print(_json(result) if arguments.json else text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise DashError(f"the result cannot be printed: {error}") from error
    return result.exit_code


def _losses(result: Comparison | LayoutComparison, shift: int = 0, first: int = 0) -> list[str]:
    """The section of the page about the losses of both runs, if they have them."""
    from ..recordings.losses import losses, sections

    of_b = {step + shift: loss for step, loss in losses(result.b).items()}
    return sections(losses(result.a), of_b, first)


def _measured(result: Comparison) -> list[str]:
    """The sections of the page about losses and, if both runs differ and have values, the sizes of differences."""
    from ..recordings import layout_page
    from ..recordings.layouts import compare_layouts, has_values

    folders, first = (Path(result.a), Path(result.b)), result.first
    found = _losses(result, result.shift, 0 if first is None else first.step)
    if first is None or not all(map(has_values, folders)):
        return found
    return found + layout_page.magnitudes(compare_layouts(*folders))


def _json(result: Comparison | LayoutComparison) -> str:
    return json.dumps(result.to_dict(), indent=2).replace(
        "\x7f", "\\u007f"
    )  # the one control character that json leaves
