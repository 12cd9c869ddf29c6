"""Which ranks have agreed on what optimizers are told: only those that did so from the beginning must go on to do so.

Programs may give each rank settings of its own, for parameters that all ranks hold parts of.  So a class of ranks is
compared once it was equal in the first steps in which it had these settings, and never if it was not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ..report.findings import Finding
from ..shared.roots import REDUCTIONS, SETTING, WHICH

AGREED = 2
"""Steps in which all ranks of a class must have been equal first."""

_KNOWN = 1 << 12  # classes and sets of settings
_NEVER = -1

PARTED = "ranks count steps differently, since one has not updated with the others"
"""Why what belongs to one step of all ranks is not compared any more."""

Promise = Literal["kept", "broken", "none", "never"]


class Promises:
    """What classes of ranks have shown, for each set of settings that they had."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], int] = {}

    def see(self, of: str, roots: Collection[str], everyone: bool) -> Promise:
        """What roots of a step mean: ranks are equal, differ though they have agreed, differ, or do so for the first
        time, so that they will never be compared.

        Args:
            of: the class.
            roots: of its ranks.
            everyone: whether these are all of them.
        """
        sets = {root[:WHICH] for root in roots}
        key = of, min(sets, default="")
        if len(sets) != 1 or not key[1] or (key not in self._steps and len(self._steps) >= _KNOWN):
            return "none"
        steps, equal = self._steps.get(key, 0), len(set(roots)) == 1
        if equal:
            if everyone and 0 <= steps < AGREED:
                self._steps[key] = steps + 1
            return "kept"
        if 0 <= steps < AGREED:
            self._steps[key] = _NEVER
            return "never"
        return "broken" if steps == AGREED else "none"


def parts(finding: Finding) -> bool:
    """Whether ranks do not update in the same steps, so that they count steps differently from now on."""
    return finding.severity != "note" and finding.stage == SETTING and finding.tensor.endswith(REDUCTIONS)
