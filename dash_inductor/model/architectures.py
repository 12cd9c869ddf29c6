"""Architectures that have tables of their own, and those that use the tables of another one."""

from __future__ import annotations

from ..errors import ArgumentError

WORKERS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "cpu": 1}
"""Nominal CTAs at a time per architecture; a constant, whatever the device in the machine has."""

SAME_AS = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_103": "sm_100", "sm_120": "sm_89", "sm_121": "sm_89"}
"""Architectures that use the tables of another one, by the shared memory of a CTA."""

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Shared memory that one CTA may use."""


def tables_of(arch: str) -> str:
    """The architecture whose tables `arch` uses.

    Raises:
        ArgumentError: an unknown architecture.
    """
    if not isinstance(arch, str) or (arch not in WORKERS and arch not in SAME_AS):
        raise ArgumentError("arch", arch, [*WORKERS, *SAME_AS])
    return SAME_AS.get(arch, arch)
