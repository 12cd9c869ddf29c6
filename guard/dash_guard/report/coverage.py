"""Counts what the guard has checked, and what it has not; the report shows both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UNSEEN = 100  # the largest number of different reasons of one check


class Coverage:
    """For each check, counts of what was checked, and of what was not checked by reason."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._unseen: dict[str, dict[str, int]] = {}
        self._reported: dict[str, Any] = {}

    def count(self, check: str, **numbers: int) -> None:
        """Add to the counts of a check, such as ``steps=1, tensors=155``."""
        counts = self._counts.setdefault(check, {})
        for name, number in numbers.items():
            counts[name] = counts.get(name, 0) + number

    def unseen(self, check: str, why: str, times: int = 1) -> None:
        """Count something that a check did not compare; `why` is a reason in words."""
        reasons = self._unseen.setdefault(check, {})
        if why not in reasons and len(reasons) >= _UNSEEN:
            why = "other reasons"
        reasons[why] = reasons.get(why, 0) + times

    def news(self) -> dict[str, Any]:
        """The counts added since the last call, in the form of `to_dict`."""
        now, before = self.to_dict(), self._reported
        self._reported = now
        return {
            check: {
                part: {
                    name: number - before.get(check, {}).get(part, {}).get(name, 0)
                    for name, number in entry[part].items()
                    if number != before.get(check, {}).get(part, {}).get(name, 0)
                }
                for part in ("counts", "unseen")
            }
            for check, entry in now.items()
            if entry != before.get(check)
        }

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the counts of another coverage, as its `to_dict` returned them."""
        for check, entry in other.items():
            self.count(check, **entry.get("counts", {}))
            for why, times in entry.get("unseen", {}).items():
                self.unseen(check, why, times)

    def to_dict(self) -> dict[str, Any]:
        """The coverage by check: ``{check: {"counts": {unit: number}, "unseen": {why: times}}}``."""
        names = dict.fromkeys([*self._counts, *self._unseen])
        return {
            name: {"counts": dict(self._counts.get(name, {})), "unseen": dict(self._unseen.get(name, {}))}
            for name in names
        }
