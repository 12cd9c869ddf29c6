"""Lowering of `dash::attention_forward`: a Triton template if the plan's forward is "portable", else the operator."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from .. import compat, ops
from ..errors import ArgumentError
from ..kernels import source
from ..schedule import costs
from ..schedule.problem import Band, Plan
from .early import arch_of
from .template import empty, kind, q_grid, realized, strides, template

log = logging.getLogger("dash_inductor")


def register() -> None:
    register_lowering(ops.attention_forward, type_promotion_kind=None)(attention_forward)


def attention_forward(
    query: TensorBox,
    key: TensorBox,
    value: TensorBox,
    mask: str,
    scale: float,
    out_order: Sequence[int],
    plan: str,
    site: str,
    keys: TensorBox | None = None,
) -> Sequence[TensorBox]:
    """out and log-sum-exp of one site; shapes as in `ops`.

    keys: bool or uint8 [batch, kv_len], no row sees a key whose entry is zero; for the portable forward only.

    Raises:
        ArgumentError: keys with a borrowed forward, a scale that fp32 cannot hold, or head dims without tiles.
    """
    parsed, band = Plan.parse(plan), Band.parse(mask)
    if parsed.forward != "portable":
        if keys is not None:
            raise ArgumentError("keys", keys, f"None with the plan {plan}: its forward reads no vector of keys")
        args = (query, key, value, mask, scale, out_order, plan, site)
        result: Sequence[TensorBox] = fallback_handler(ops.attention_forward, add_to_fallback_set=False)(*args)
        return result
    log.debug("lowering the forward of %s: mask=%s plan=%s", site, mask, plan)
    inputs = [realized(x) for x in (query, key, value)]
    device = query.get_device()
    assert device is not None
    guard, multiple = V.graph.sizevars.guard_int, V.graph.sizevars.statically_known_multiple_of
    batch, q_heads, q_len, head_dim = query.get_size()
    _, heads, kv_len, value_dim = value.get_size()
    dims = guard(head_dim), guard(value_dim)
    tiles = costs.forward_tiles(arch_of(device), 8 * query.get_dtype().itemsize, *dims)
    constants = source.constants(
        parsed,
        tiles,
        band,
        scale,
        dims[0],
        guard(q_heads) // guard(heads),
        (q_len, kv_len),
        even_q=multiple(q_len, tiles.block_q),
        even_kv=multiple(kv_len, tiles.block_kv),
        interpret=compat.interpreting(),
        has_keys=keys is not None,
    )
    rows = [batch, q_heads, q_len]
    logsumexp = empty(rows, (0, 1, 2), torch.float32, device)
    size = [*rows, value_dim]
    out = template(
        f"dash_forward_{kind(band, has_keys=keys is not None)}",
        source.forward_template(band.lo is not None, band.hi is not None, keys is not None),
        q_grid,
        [*inputs, logsumexp, *([] if keys is None else [realized(keys)])],
        FixedLayout(device, query.get_dtype(), size, stride=strides(size, out_order)),
        mutated=[logsumexp],
        call_sizes=rows,
        tiles=tiles,
        constants=constants | source.forward_constants(scale, dims[1]),
    )
    return out, logsumexp
