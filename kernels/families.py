"""The kernel families there are, and which of them is preferred."""

from __future__ import annotations

from ..errors import ArgumentError
from ..model.site import BITS, Site
from .family import Family
from .hopper.family import FAMILY as HOPPER
from .portable.family import FAMILY as PORTABLE
from .reference.family import FAMILY as REFERENCE

FAMILIES: tuple[Family, ...] = (REFERENCE, PORTABLE, HOPPER)
"""From the most general to the most special.  The planner takes the last one that covers a site and does not leave it:
predicted times of different families are not calibrated together, so it compares none of them.
"""


def family(name: str, argument: str = "family") -> Family:
    """The family of this name, a value of `Plan.kernel` or `Plan.forward`.

    Raises:
        ArgumentError: there is none; it names `argument`.
    """
    for each in FAMILIES:
        if each.name == name:
            return each
    raise ArgumentError(argument, name, [each.name for each in FAMILIES])


def head_dims_in_words(site: Site, arch: str) -> str:
    """The head dims that can be planned for sites like this one."""
    ranges = [f"{f.name}: {f.head_dims}" for f in FAMILIES if f.runs_on(arch, BITS[site.dtype])]
    return f"multiples of 8 ({'; '.join(ranges)})"
