"""The numerics key of a plan: all facts that can change a bit of a result, as plain text."""

from __future__ import annotations

from ..kernels.family import Candidate
from ..model.plan import Tiles
from ..model.site import Site
from .forward import Forward

NUMERICS_VERSION = 17
"""The version in numerics keys; increase it when a kernel changes bits of results under an otherwise equal key."""


def numerics_key(
    site: Site, arch: str, kernel: str, name: str, candidate: Candidate, forward: Forward, tf32: bool
) -> str:
    """The numerics key of a plan: a text with everything that can change a bit of the output or of a gradient.

    Pipeline stages, head chunk, batch size and lengths are not part of it, because they cannot change bits.

    Args:
        site, arch: the site and the architecture.
        kernel: the kernel family of the backward.
        name: the schedule.
        candidate: the tiles of the backward.
        forward: the forward kernel.
        tf32: whether fp32 matmuls use TF32.
    """
    tiles = [f"dkdv={_shape(candidate.dkdv)}"] + ([f"dq={_shape(candidate.dq)}"] if candidate.dq else [])
    dims = f"d{site.head_dim}" if site.value_dim == site.head_dim else f"d{site.head_dim}v{site.value_dim}"
    mask = components(site).replace(":varlen(", ":placed(")  # keys have the text that they have always had
    facts = [site.dtype + ("+tf32" if tf32 else ""), dims, mask, f"group{site.group}", arch]
    facts += [] if site.dropout is None else [f"dropout={site.dropout}"]
    split_kv = "" if forward.split_kv else ",split_kv=off"
    facts.append(f"forward={forward.name}:{_shape(forward.tiles)}{split_kv}")
    return "/".join([f"v{NUMERICS_VERSION}", kernel, name, *tiles, *facts])


def components(site: Site) -> str:
    """The mask, the score modifiers and the names of the forward's operands as text, joined by " + ".

    "logsumexp" is added if the program reads the log-sum-exp.  Dropout is left out, because it has a part of its own in
    the key.
    """
    modifiers = [f"{name} {value!r}" for name, value in site.spec.modifiers.items()]
    operands = [name for name in site.spec.of_forward.given if name != "dropout"]
    return " + ".join([str(site.mask), *modifiers, *operands, *(["logsumexp"] if site.spec.logsumexp else [])])


def _shape(tiles: Tiles) -> str:
    return f"{tiles.block_q}x{tiles.block_kv}w{tiles.num_warps}"
