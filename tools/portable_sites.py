"""Prints at which sites of a sweep an sm_90 GPU runs portable kernels, and why.

    python -m tools.portable_sites

The sweep has every combination of dtypes, head dims, heads, lengths, masks and dropout; a site is counted under the
reason for which the planner does not take the Hopper kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from dash_inductor.kernels.families import HOPPER, PORTABLE
from dash_inductor.model import AttentionSpec, Mask, Site
from dash_inductor.model.components import Operand
from dash_inductor.model.dropout import Dropout
from dash_inductor.model.mask import Band
from dash_inductor.model.operands import Bias
from dash_inductor.planning.planner import choose

ARCH = "sm_90"
DTYPES = ("bfloat16", "float16", "float32")
DIMS = (32, 40, 64, 80, 128, (192, 128), 256)
HEADS = ((8, 8), (8, 2))
LENGTHS = ((4096, 4096), (None, None))
BOUNDS = (0, 10, 64, 65, 128, 300, 1024, None)
"""How far bands reach to either side of the diagonal."""
DATA = ("", "keys(0)", "segments(0,0)", "segments(0,0) & keys(1)", "dense(0)", "bias")


def sites() -> Iterator[Site]:
    """Yields all sites of the sweep that some kernels cover."""
    for dtype, dims, (q_heads, kv_heads), (q_len, kv_len) in product(DTYPES, DIMS, HEADS, LENGTHS):
        head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
        for spec in calls():
            found = Site("cuda", dtype, 2, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, spec)  # type: ignore[arg-type]
            if PORTABLE.covers(found, ARCH) or HOPPER.covers(found, ARCH):
                yield found


def calls() -> Iterator[AttentionSpec]:
    for before, after, data, p in product(BOUNDS, BOUNDS, DATA, (0.0, 0.1)):
        band = Band(None if after is None else -after, before)
        components = [str(band)] if band != Band() or data in ("", "bias") else []
        components += [data] if data not in ("", "bias") else []
        spec = AttentionSpec(Mask.parse(" & ".join(components)), 0.125)
        if data == "bias":
            spec = replace(spec, bias=Bias(Operand(0), gradient=True))
        yield replace(spec, dropout=Dropout(p, Operand(len(spec.operands)))) if p else spec


def why_portable(site: Site) -> str | None:
    """Returns why the planner chooses portable kernels, in words; None where it chooses Hopper kernels.

    Raises:
        AssertionError: it chooses portable kernels though the Hopper kernels cover the site and do not leave it.
    """
    if choose(site, ARCH).kernel != PORTABLE.name:
        return None
    reason = HOPPER.leaves(site) if HOPPER.covers(site, ARCH) else HOPPER.why_not(site, ARCH)
    assert reason is not None, site
    return reason


def main() -> None:
    counts: dict[str, tuple[int, Site]] = {}
    total = 0
    for site in sites():
        total += 1
        reason = why_portable(site)
        if reason is not None:
            counts[reason] = counts.get(reason, (0, site))[0] + 1, counts.get(reason, (0, site))[1]
    print(f"{total} sites, of which {sum(n for n, _ in counts.values())} run portable kernels on {ARCH}:")
    for reason, (count, site) in counts.items():
        print(f"{count:6}  {reason}; for example {site.dtype}, head dim {site.head_dim}, {site.spec}")


if __name__ == "__main__":
    main()
