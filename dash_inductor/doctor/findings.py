"""Findings of checks, and how bad they are."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import DashError


class Severity(enum.IntEnum):
    """How bad a finding is, the worst last."""

    OK = 0
    """A fact, and nothing to do."""
    NOTE = 1
    """Worth knowing: nothing is broken."""
    WARNING = 2
    """Bits may differ between runs, or attention stays as PyTorch has it."""
    ERROR = 3
    """dash_inductor cannot work here, or gradients are wrong."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has seen.

    Attributes:
        check: the name of the check.
        severity: how bad it is.
        what: what was seen, a sentence or a fact.
        advice: what to do; "" for a finding with nothing to do.
    """

    check: str
    severity: Severity
    what: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """Plain strings, for JSON."""
        return {
            "check": self.check,
            "severity": self.severity.name.lower(),
            "what": self.what,
            "advice": self.advice,
        }


Seen = tuple[Severity, str, str]
"""Severity, what was seen, and advice."""

Check = Callable[[], Iterator[Seen]]
"""A check yields what it sees; one that has nothing to say yields nothing.  Its function's name is its name."""


def run(checks: Iterable[Check]) -> Iterator[Finding]:
    """The findings of the checks, in their order.

    A check that raises is an error with the exception's message: the doctor is called to broken installations.
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
    """0 if there are only facts and notes, 1 with warnings, 2 with errors."""
    return max(0, max((finding.severity for finding in findings), default=Severity.OK) - Severity.NOTE)
