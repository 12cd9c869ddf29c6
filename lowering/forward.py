"""Inductor lowering of the attention forward: a Triton template if its family has one, else the operator."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..kernels import registry
from ..kernels.portable import templates
from ..model.attention_spec import AttentionSpec
from ..model.plan import Plan
from ..operators import attention as ops
from ..upstream import compat
from ..upstream.inductor import FixedLayout, TensorBox, V, register_lowering
from .operator_call import operator_call
from .template import as_given, empty, heads_first, q_grid, realized, strides, template
from .vectors import Vectors, dense_of_heads, sizes_of

log = logging.getLogger("dash_inductor")


def register() -> None:
    register_lowering(ops.attention_forward, type_promotion_kind=None)(attention_forward)


def attention_forward(
    query: TensorBox,
    key: TensorBox,
    value: TensorBox,
    extras: Sequence[TensorBox],
    spec: str,
    plan: str,
    site: str,
) -> Sequence[TensorBox]:
    """Lowers the operator `attention_forward`; returns (out, log-sum-exp) of one attention, with shapes as in `ops`.

    The arguments are those of the operator; `spec`, `plan` and `site` are texts.

    Raises:
        ArgumentError: fp32 cannot represent the scale.
    """
    parsed, described = Plan.parse(plan), AttentionSpec.parse(spec)
    tiles = parsed.forward_tiles
    if tiles is None or not registry.has_templates(parsed.forward):
        return operator_call(ops.attention_forward, query, key, value, extras, spec, plan, site)
    log.debug("lowering the forward of %s: spec=%s plan=%s", site, spec, plan)
    query, key, value = heads_first((query, key, value), described)
    inputs = [realized(x) for x in (query, key, value)]
    device = query.get_device()
    assert device is not None
    multiple = V.graph.sizevars.statically_known_multiple_of
    batch, q_heads = query.get_size()[:2]
    _, heads, _, value_dim = value.get_size()
    sizes = sizes_of(described, extras, query, key, value)
    described, extras = dense_of_heads(described, extras, [batch, q_heads, sizes.q_len, sizes.kv_len])
    even = multiple(sizes.q_len, tiles.block_q), multiple(sizes.kv_len, tiles.block_kv)
    constants = templates.compile_time_values(
        parsed, tiles, described, sizes, even=even, interpret=compat.interpreting()
    )
    rows = [batch, q_heads, sizes.q_len]
    sums = [batch, q_heads, ops.numbers_per_row(described) * sizes.q_len]
    logsumexp = empty(sums, (0, 1, 2), torch.float32, device)
    size = [*query.get_size()[:3], value_dim]
    vectors = Vectors(described, extras, (*rows, sizes.kv_len), heads)
    out = template(
        f"dash_forward_{described.traits}",
        templates.forward_template(described.traits),
        q_grid,
        [
            *inputs,
            logsumexp,
            *vectors.of_rows,
            *vectors.arguments(sums_keys=True),
        ],
        FixedLayout(device, query.get_dtype(), size, stride=strides(size, described.orders[0])),
        mutated=[logsumexp],
        call_sizes=rows,
        tiles=tiles,
        constants=constants | templates.forward_constants(described),
    )
    return *as_given((out,), described), logsumexp
