"""What checks report: findings, their severities, and the exit status that follows from them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import DashError


class Severity(enum.IntEnum):
    """The severity of a finding: OK (a fact), a note, a warning or an error."""

    OK = 0
    """A fact that needs no action."""
    NOTE = 1
    """Useful information; nothing is broken."""
    WARNING = 2
    """Bits may differ between runs, or attention is not replaced."""
    ERROR = 3
    """dash_inductor cannot work, or gradients are wrong."""


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        check: the name of the check.
        severity: its severity.
        what: what was found, a sentence or a fact.
        advice: what to do; "" if there is nothing to do.
    """

    check: str
    severity: Severity
    what: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as strings, for JSON."""
        return {
            "check": self.check,
            "severity": self.severity.name.lower(),
            "what": self.what,
            "advice": self.advice,
        }


Seen = tuple[Severity, str, str]
"""What a check yields: severity, what was found, and advice."""

Check = Callable[[], Iterator[Seen]]
"""A check: a function that yields its findings, if any.  The function's name is the name of the check."""


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """Runs checks and yields their findings, in order.

    A check that raises becomes an ERROR finding with the exception's message, because the doctor must also work in
    broken installations.
    """
    for check in checks:
        name = check.__name__
        try:
            for severity, what, advice in check():
                yield Finding(name, severity, what, advice)
        except Exception as error:
            what = str(error) if isinstance(error, DashError) else f"the check failed: {type(error).__name__}: {error}"
            yield Finding(name, Severity.ERROR, what, "Mend what the message names, or report it.")


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit status of the doctor for these findings: 0 for facts and notes alone, 1 with warnings, 2 with errors."""
    return max(0, max((finding.severity for finding in findings), default=Severity.OK) - Severity.NOTE)
