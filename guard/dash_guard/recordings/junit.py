"""Shows a comparison as a JUnit report, which CI systems read: one test case, whose failure is the difference."""

from __future__ import annotations

from xml.etree import ElementTree

from dash_inductor.untrusted import printable

from .compare import Comparison
from .layouts import LayoutComparison
from .report import text, text_of_layouts

_OUTCOMES = {1: "failure", 2: "error"}
"""The element of a test case by the exit status of a comparison: for runs that differ, and for incomparable ones."""


def xml(result: Comparison | LayoutComparison, command: str, subject: str) -> str:
    """The report as XML.

    Args:
        result: the comparison.
        command: the subcommand of `dash-guard`, the class name of the test case.
        subject: the name of the test case, such as the folders of the two runs.
    """
    whole = text(result) if isinstance(result, Comparison) else text_of_layouts(result)
    return _case(whole, _OUTCOMES.get(result.exit_code), command, subject)


def error(message: str, command: str, subject: str) -> str:
    """The report as XML where there is no comparison, with the error that prevented it; arguments as for `xml`."""
    return _case("\n".join(map(printable, message.splitlines())), "error", command, subject)


def _case(whole: str, outcome: str | None, command: str, subject: str) -> str:
    counts = {kind + "s": str(int(kind == outcome)) for kind in _OUTCOMES.values()}
    suite = ElementTree.Element("testsuite", {"name": "dash-guard", "tests": "1", **counts})
    case = ElementTree.SubElement(suite, "testcase", classname=f"dash_guard.{command}", name=printable(subject))
    if outcome is None:
        ElementTree.SubElement(case, "system-out").text = whole
    else:
        ElementTree.SubElement(case, outcome, message=whole.splitlines()[0]).text = whole
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
