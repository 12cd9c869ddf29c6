"""The Hopper backward and the portable one under bands, in turns: what the planner's choice between families rests on.

    python -m benchmarks.bands [--only d64 ...] [--list]

One backward, from saved tensors to gradients, in milliseconds; medians.  The portable kernels run without Inductor,
behind a compiled kernel that makes the deltas.  Tables of masks that are data are made before.  Four minutes on an idle
GPU; results: benchmarks/results/bands.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch

from dash_inductor.kernels.common.mask_data import MaskTables
from dash_inductor.kernels.families import FAMILIES
from dash_inductor.kernels.portable import standalone
from dash_inductor.model import AttentionSpec, Mask, Plan, Site
from dash_inductor.operators.attention import attention_backward
from dash_inductor.operators.mask_tables import mask_tables
from dash_inductor.planning import planner

from . import common
from .shapes import Shape

NARROW = ("band(-32,32)", "band(-64,64)", "band(-96,96)", "band(-128,128)", "band(0,63)", "band(0,127)", "band(-64,0)")
WIDE = ("band(0,0)", "band(0,255)", "band(-256,256)", "band(-512,512)", "band(-10,none)", "band(none,10)")
DATA = ("band(-64,64) & keys(0)", "band(-128,128) & keys(0)", "band(-64,64)/dropout=0.1,0", "band(0,127)/dropout=0.1,0")
SIZES = ((64, 2, 32, 8192), (64, 1, 8, 2048), (128, 2, 16, 8192), (40, 2, 32, 8192))
"""Head dim, batch, heads, length."""


@dataclass(frozen=True)
class Case:
    """One backward; `text` is the mask and the remainder of the call's text after the scale."""

    shape: Shape
    text: str

    @property
    def name(self) -> str:
        return f"d{self.shape.head_dim}:{self.text}:b{self.shape.batch}h{self.shape.q_heads}:s{self.shape.length}"

    @property
    def site(self) -> Site:
        mask, slash, rest = self.text.partition("/")
        return replace(self.shape.site(), spec=AttentionSpec.parse(f"{mask}/scale={self.shape.scale!r}{slash}{rest}"))

    def plan(self, family: str) -> Plan:
        """Returns the plan that the planner would choose if there were no other kernels."""
        planner._choose.cache_clear()
        with mock.patch.object(planner, "FAMILIES", [f for f in FAMILIES if f.name == family]):
            return planner.plan(self.site, "sm_90")


def cases() -> Iterator[Case]:
    for dim, batch, heads, length in SIZES:
        for text in (*NARROW, *(WIDE if dim != 40 else ()), *(DATA if dim == 64 else ())):
            mask = Mask.parse(text.partition("/")[0])
            yield Case(Shape("bands", batch, heads, heads, length, dim, dim, mask.band), text)


@torch.compile(dynamic=False)
def deltas(out: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
    return (out.float() * do.float()).sum(-1)


def backwards(case: Case) -> list[Callable[[], object]]:
    """Returns both backwards; `out` and log-sum-exp are placeholders, not those of a forward, and all keys are
    valid.
    """
    site, hopper = case.site, case.plan("hopper")
    q, k, v, do = (tensor.contiguous() for tensor in case.shape.tensors())
    lse, seed = torch.full(q.shape[:3], 6.0, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    extras = [seed] if site.dropout is not None else []
    if site.mask.operands:
        extras = [torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device="cuda")]
        sizes = q.shape[2], k.shape[2], q.shape[0], site.q_heads, site.kv_heads
        made = MaskTables(*mask_tables(extras, *sizes, str(site.mask), str(hopper), True))
        extras += [made.q_vectors, made.kv_vectors, made.keys_seen, made.visits, made.steps, made.contributions]
    spec = str(replace(site.spec, orders=((0, 1, 2, 3),) * 3))
    given = {"Q": q, "K": k, "V": v, "DO": do, "OUT": do, "LSE": lse, "DELTA": deltas(do, do), "SEED": seed}
    given["KEYS"] = torch.ones(k.shape[:3], dtype=torch.int32, device="cuda")
    given |= {name: torch.empty_like(q) for name in ("DQ_OUT", "DK_OUT", "DV")}
    kernels = standalone.render(case.plan("portable"), site)
    launches = [
        (standalone.build(kernel, "sm_90")[(kernel.grid, 1, 1)], [given[name] for name in kernel.names])
        for kernel in kernels
    ]

    def portable() -> None:
        deltas(do, do)
        for launch, arguments in launches:
            launch(*arguments)

    return [lambda: attention_backward(do, q, k, v, do, lse, extras, spec, str(hopper), "site"), portable]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words, of which one is in the names of the shapes")
    parser.add_argument("--list", action="store_true", help="print the names of the shapes")
    parser.add_argument("--name", default="bands", help="name of the results file")
    options = parser.parse_args()
    rows = []
    for case in (c for c in cases() if any(word in c.name for word in options.only)):
        if options.list:
            print(case.name)
            continue
        common.watchdog(120)
        hopper, portable = common.time_ms(*backwards(case))
        rows.append({"shape": case.name, "hopper": hopper, "portable": portable, "ratio": portable / hopper})
        common.table(rows[-1:])
        common.write(options.name, {"conditions": common.conditions(), "rows": rows})


if __name__ == "__main__":
    main()
