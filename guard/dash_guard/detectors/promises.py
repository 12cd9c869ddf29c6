"""Remembers which classes of ranks have agreed on optimizer settings: only those must keep agreeing.

Programs may give each rank its own settings for parameters that all ranks hold shards of. So a class of ranks is
compared if it was equal in the first steps in which it had these settings, and never if it was not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ..report.findings import Finding
from ..shared.roots import REDUCTIONS, SETTING, WHICH

AGREED = 2
"""The number of steps in which all ranks of a class must have been equal first."""

_KNOWN = 1 << 12  # classes and sets of settings
_NEVER = -1

PARTED = "ranks count steps differently, because one has not updated with the others"
"""The reason in the coverage why one step of all ranks is no longer compared."""

Promise = Literal["kept", "broken", "none", "never"]


class Promises:
    """Remembers whether the ranks of each class have agreed on their optimizer settings, for each set of settings."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], int] = {}

    def see(self, of: str, roots: Collection[str], everyone: bool) -> Promise:
        """Compare the ranks of a class by the root digests of their optimizer settings in a step.

        Args:
            of: the name of the class.
            roots: the root digests of its ranks.
            everyone: whether these are the roots of all ranks of the class.

        Returns:
            "kept": the ranks are equal; "broken": they differ after they have agreed; "never": they differ for the
            first time before they have agreed, and will never be compared; "none": nothing can be said.
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
    """Whether a finding says that ranks do not update in the same steps, so that their step numbers no longer match."""
    return finding.severity != "note" and finding.stage == SETTING and finding.tensor.endswith(REDUCTIONS)
