"""GPU architectures that have tuning tables of their own, and those that use the tables of another one."""

from __future__ import annotations

from ..errors import ArgumentError

WORKERS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "cpu": 1}
"""Nominal number of CTAs that run at a time, per architecture; a constant, independent of the device in use."""

SAME_AS = {"sm_86": "sm_89", "sm_87": "sm_80", "sm_103": "sm_100", "sm_120": "sm_89", "sm_121": "sm_89"}
"""Architectures that use the tables of another one, chosen by the shared memory available to a CTA."""

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Shared memory available to one CTA, in bytes."""

GPUS = {"a100": "sm_80", "l40s": "sm_89", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100"}
"""The architectures of GPUs that may be named instead."""

ARCHS = f"{', '.join(GPUS)}, cpu, or an architecture such as sm_90"
"""The names that `architecture` takes, in words."""


def architecture(name: str) -> str:
    """Return the architecture that a user names: "sm_90" for "h100", "H200" and "sm_90", and "cpu" for "cpu".

    Raises:
        ArgumentError: there is no such name.
    """
    known = [*GPUS, *WORKERS, *SAME_AS]
    if not isinstance(name, str) or name.lower() not in known:
        raise ArgumentError("arch", name, known)
    return GPUS.get(name.lower(), name.lower())


def tables_of(arch: str) -> str:
    """Return the architecture whose tuning tables `arch` uses: itself, or the one to which `SAME_AS` maps it.

    Raises:
        ArgumentError: `arch` is unknown.
    """
    if not isinstance(arch, str) or (arch not in WORKERS and arch not in SAME_AS):
        raise ArgumentError("arch", arch, [*WORKERS, *SAME_AS])
    return SAME_AS.get(arch, arch)
