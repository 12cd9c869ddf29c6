"""The registered kernel families, from the most general to the most specialised."""

from __future__ import annotations

from ..errors import ArgumentError
from ..model.site import BITS, Site
from .family import Family
from .hopper.family import FAMILY as HOPPER
from .portable.family import FAMILY as PORTABLE
from .reference.family import FAMILY as REFERENCE

FAMILIES: tuple[Family, ...] = (REFERENCE, PORTABLE, HOPPER)
"""All families, from the most general to the most specialised.

The planner takes the last family that covers a site and whose `Family.leaves` returns None.  It does not compare
predicted times across families, because they are not calibrated against each other.
"""


def family(name: str, argument: str = "family") -> Family:
    """Returns the family with this name, a value of `Plan.kernel` or `Plan.forward`.

    Raises:
        ArgumentError: no family has this name; the error names `argument`.
    """
    for each in FAMILIES:
        if each.name == name:
            return each
    raise ArgumentError(argument, name, [each.name for each in FAMILIES])


def head_dims_in_words(site: Site, arch: str) -> str:
    """Describes, for an error message, the head dims that any family covers for the dtype of `site` on `arch`."""
    ranges = [f"{f.head_dims} ({f.name})" for f in FAMILIES if f.runs_on(arch, BITS[site.dtype])]
    return "; ".join(ranges)
