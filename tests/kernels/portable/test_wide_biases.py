"""Biases of float32 beside operands of 16 bits, and beside masks that are data: their kernels fit into shared memory.

FlexAttention has such calls: what a `score_mod` adds is computed in float32.
"""

from __future__ import annotations

import itertools
from unittest import mock

from dash_inductor.kernels.portable import standalone
from dash_inductor.model.architectures import SHARED_BYTES
from dash_inductor.model.attention_spec import AttentionSpec
from dash_inductor.model.components import Dense, Operand, Segments
from dash_inductor.model.mask import Band, Mask
from dash_inductor.model.operands import Bias
from dash_inductor.model.plan import Fallback
from dash_inductor.model.site import Site
from dash_inductor.planning import decide

from ...support.cases import some
from ...support.portable_builds import built

MASKS = {
    "band": Mask(Band(0, None)),
    "segments": Mask(Band(0, None), segments=Segments(Operand(0), Operand(0))),
    "dense": Mask(Band(), dense=Dense(Operand(0))),
}
_plain = standalone._tensors


def _with_wide_biases(site: Site) -> dict[str, tuple[object, str]]:
    found = dict(_plain(site))
    return found | {name: (found[name][0], "*fp32") for name in ("BIAS", "DBIAS")}


DIMS = (128, 128), (192, 128), (256, 256)
CASES = list(itertools.product(MASKS, SHARED_BYTES, DIMS))
SOON = [("band", "sm_90", (192, 128)), *((name, "sm_90", (128, 128)) for name in ("segments", "dense"))]


@some(CASES, SOON)
def test_they_fit(case: tuple[str, str, tuple[int, int]]) -> None:
    name, arch, dims = case
    mask = MASKS[name]
    spec = AttentionSpec(mask, 0.1, bias=Bias(Operand(len(AttentionSpec(mask, 0.1).operands)), True))
    site = Site(
        device="cuda", dtype="bfloat16", batch=2, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=dims[0],
        value_dim=dims[1], spec=spec, allow_tf32=False,
    )  # fmt: skip
    plan = decide(site, arch, "auto")
    assert not isinstance(plan, Fallback)
    with mock.patch.object(standalone, "_tensors", _with_wide_biases):
        kernels = [standalone.render_forward(plan, site), *standalone.render(plan, site)]
        used = [built(kernel, arch)[1].shared_memory for kernel in kernels]
    assert max(used) <= SHARED_BYTES[arch], used
