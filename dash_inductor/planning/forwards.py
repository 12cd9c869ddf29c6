"""Which forward runs at a site: the fastest one whose bits are known to be the same on every call and in every batch.

Most are borrowed, so each has its own limits, written down here and nowhere else:

* "cudnn" computes full masks and causal ones anchored top left.  It comes with a proof by experiment only, so it is
  planned on the architecture on which `benchmarks/forwards.py` was run, and not for a single query that sees all keys:
  there its log-sum-exp differs from call to call.
* "flash", FlashAttention-2 through its entry for packed sequences, computes bands that contain the bottom-right
  diagonal.  To it, no right bound beside a left one is one of kv_len, and one of kv_len or more is none: both are wrong
  where there are more queries than keys.
* "efficient", the memory-efficient kernel, computes fp32; its windows are aligned bottom right, and wrong where a row
  sees no key, so it needs equal lengths there.
* "cpu" is PyTorch's CPU kernel.

A kernel family may have a forward too.  "reference" is what the CPU has for other masks than full and causal ones, and
"portable" what CUDA has for masks with keys.

"cudnn", "flash" and "cpu" are wrong for a scale that is not positive: they look for the largest score before they scale
it, and a hidden score of -inf becomes inf.  Where none fits, "keep" leaves the graph's own forward, whose bits are
PyTorch's matter: deterministic, but not always the same in another batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..model.plan import Tiles
from ..model.site import Site
from . import costs
from .families import BITS, HOPPER, PORTABLE, REFERENCE, hopper_dims

CUDNN_ARCH = "sm_90"
"""Where cuDNN's forward has been compared with itself."""


@dataclass(frozen=True)
class Forward:
    """The forward of a site.

    Args:
        name: as in `Plan.forward`.
        tiles: those of a kernel family's forward; None for the other forwards.
        note: where `name` is "keep", what rules the others out.
    """

    name: str
    tiles: Tiles | None = None
    note: str = ""


def choose(site: Site, arch: str) -> Forward:
    """The forward of a site on an architecture with tables of its own."""
    if site.device == "cpu":
        return own(site, arch) if _cpu(site) else Forward("cpu")
    if site.mask.keys is not None:
        return own(site, arch)  # nobody else's reads keys without a mask tensor of [q_len, kv_len]
    causes = []
    for name in _ORDER.get(arch, ("flash", "efficient")):
        cause = _RULES[name](site)
        if not cause:
            return Forward(name)
        causes.append(f"{name}: {cause}")
    return Forward("keep", note="; ".join(causes))


def own(site: Site, arch: str) -> Forward:
    """The forward that a kernel family has for a site, whatever others there are."""
    dims = hopper_dims(site.head_dim, site.value_dim)
    if HOPPER.runs_on(arch, BITS[site.dtype]) and dims is not None and site.mask.keys is None:
        return Forward(HOPPER.name, costs.HOPPER_FORWARD[dims])
    family = REFERENCE if site.device == "cpu" else PORTABLE
    return Forward(family.name, costs.forward_tiles(arch, BITS[site.dtype], site.head_dim, site.value_dim))


def _cpu(site: Site) -> str:
    if site.mask.operands:
        return "reads bands alone"
    return _scale(site) or ("" if site.band.is_full or _is_causal(site) else "not full or causal")


def _cudnn(site: Site) -> str:
    if site.dtype == "float32" or site.head_dim > 128 or site.value_dim != site.head_dim:
        return "16-bit and equal head dims up to 128 only"
    if not (site.band.is_full or _is_causal(site)):
        return f"full and causal masks only, not {site.band}"
    if site.band.is_full and site.least_q_len < 2:
        return "not the same bits on every call for a single query"
    return _scale(site)


def _flash(site: Site) -> str:
    if site.dtype == "float32" or site.value_dim != site.head_dim:
        return "16-bit and equal head dims only"
    if site.q_len is not None and site.kv_len is not None:
        band = site.band.resolve(site.q_len, site.kv_len)
        offset = site.kv_len - site.q_len
    elif site.band.is_full or site.square or site.band.anchor == "bottom_right":
        band, offset = site.band, 0
    else:
        return "aligns masks bottom right"
    if (band.lo is not None and band.lo + offset > 0) or (band.hi is not None and band.hi + offset < 0):
        return f"{site.band} does not contain the bottom-right diagonal"
    if not band.is_full and (band.lo is None or band.lo + offset < 0) and not site.q_within_kv:
        return "look-ahead is wrong where there are more queries than keys"
    return _scale(site)


def _efficient(site: Site) -> str:
    if site.dtype != "float32" or site.value_dim != site.head_dim or site.head_dim > 128:
        return "planned for fp32 and equal head dims up to 128 only"
    if not (site.band.is_full or _is_causal(site) or (site.square and site.band.lo == 0)):
        return f"cannot compute {site.band} for these lengths"
    return "" if math.isfinite(site.scale) else f"wrong for scale={site.scale}"


def _is_causal(site: Site) -> bool:
    """What PyTorch's operators mean by ``is_causal``: anchored top left."""
    return (site.band.lo, site.band.hi) == (0, None) and (site.square or site.band.anchor == "top_left")


def _scale(site: Site) -> str:
    return "" if 0 < site.scale < math.inf else f"wrong for scale={site.scale}"


_RULES: dict[str, Callable[[Site], str]] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}
_ORDER = {CUDNN_ARCH: ("cudnn", "flash", "efficient")}
