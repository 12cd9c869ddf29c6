"""``dash-inductor dump script.py [arguments]``: writes a folder of pages about every graph that a script compiles."""

from __future__ import annotations

import argparse
import json
import webbrowser
from pathlib import Path

from ..model.architectures import ARCHS, architecture
from . import outputs, script_arguments

EPILOG = f"""
{script_arguments.RUNS}  No graph is taken from a cache.
The folder is what a report of a defect needs: doctor.txt has the versions, the GPU and the settings.
Exit status: 0, 1 if no graph with attention was compiled or if the script failed or was interrupted, 2 for bad
arguments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``dash-inductor dump``."""
    parser.epilog = EPILOG
    parser.add_argument("-o", "--output", metavar="FOLDER", default="dash_inductor_dump", help="default: %(default)s")
    parser.add_argument("--arch", help=f"plan, and compile kernels, for this device, which need not be there: {ARCHS}")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    script_arguments.add_arguments(parser, required=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs the script and writes its pages; returns 0 if it ended without an error and has attention, else 1."""
    from ..doctor import diagnose
    from ..doctor.report import format_report
    from ..explanations.dump import writer
    from ..explanations.script import explain_script

    script_arguments.check(arguments)
    outputs.check_folder("output", Path(arguments.output))
    arch = None if arguments.arch is None else architecture(arguments.arch)
    with writer.dumping(str(Path(arguments.output).resolve()), arch):
        explanation, ended = explain_script(arguments.script, arguments.script_arguments, arch, arguments.stop_after)
        page = writer.index()
    if page is not None:
        (page.parent / "doctor.txt").write_text(format_report(diagnose(), colours=False) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps({"index": str(page) if page else None, **explanation.to_dict()}, indent=2))
    else:
        print("\n".join([*explanation.notes, str(page) if page else "no graph was dumped"]))
    if page is not None and arguments.open:
        webbrowser.open(page.as_uri())
    return 0 if page is not None and ended and explanation.sites else 1
