"""Puts the text of a portable kernel together: template body + device functions + the schedule's generated functions.

A body is Inductor template text (`def_kernel`, `size`, `stride`, `store_output` are its hooks); `standalone.py` renders
the same text without Inductor, so what is compiled in tests is what Inductor compiles.
"""

from __future__ import annotations

import ast
import functools
from importlib import resources
from typing import Any

from ..model.mask import Band
from ..model.plan import Plan, Tiles
from ..schedule import codegen, geometry

_COMMON = """
    batch = {{size("Q", 0)}}
    q_heads = {{size("Q", 1)}}
    q_len = {{size("Q", 2)}}
    heads = {{size("K", 1)}}
    kv_len = {{size("K", 2)}}
    lo = LO
    hi = HI
    if BOTTOM_RIGHT:
        lo = LO - (kv_len - q_len)
        hi = HI - (kv_len - q_len)
    q_strides = ({{stride("Q")}},)
    k_strides = ({{stride("K")}},)
    v_strides = ({{stride("V")}},)
    do_strides = ({{stride("DO")}},)
    lse_strides = ({{stride("LSE")}},)
"""

_DKDV_HEAD = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO", "DV"%(dq_argument)s)}}
    # Q, DO: [batch, q_heads, q_len, HEAD_DIM]; K, V, DV and the output (dk): [batch, heads, kv_len, HEAD_DIM]
    # LSE: [batch, q_heads, >= q_len] natural log; DELTA: [batch, q_heads, q_len] rowsum(out * do)
    # lo <= q - kv <= hi is the mask (bounds exist where HAS_LO, HAS_HI); SECTION heads are launched together
"""

_DKDV_TAIL = """
    dv_strides = ({{stride("DV")}},)
    head, slot = dash_launch(ticket, batch, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV, SECTION)
    b = head // heads
    h = head % heads
    for part in range(PARTS):
        kv = dash_kv_tile(slot, part, h, heads, q_len, kv_len, lo, hi, BLOCK_Q, BLOCK_KV)
        dk, dv = dkdv_tile(
            Q, K, V, DO, LSE, DELTA, dq_acc, semaphores,
            q_strides, k_strides, v_strides, do_strides, lse_strides,
            b, h, kv, heads, q_len, kv_len, lo, hi, SCALE,
            BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, GROUP, HAS_LO, HAS_HI, EVEN_Q, EVEN_KV,
            ORDERED, PRECISION, STAGES, INDEX_DTYPE, INTERPRET,
        )
        dk = dk * SCALE
        idx_n = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX_DTYPE)[:, None]
        idx_d = tl.arange(0, BLOCK_D)[None, :]
        inside = (idx_n < kv_len) & (idx_d < HEAD_DIM)
        dv_head = head_start(DV, b, h, dv_strides)
        dv_ptrs = dv_head + idx_n * dv_strides[2] + idx_d * dv_strides[3]
        tl.store(dv_ptrs, dv.to(DV.dtype.element_ty), mask=inside)
        idx_b = b.to(INDEX_DTYPE)
        idx_h = h.to(INDEX_DTYPE)
        {{store_output(("idx_b", "idx_h", "idx_n", "idx_d"), "dk", "inside", indent_width=8,
                       val_shape=("BLOCK_KV", "BLOCK_D"))}}
"""

# One pass: ticket and semaphores are the workspace, see Note [Forward progress] in ordering.py.
_ORDERED_ENTRY = """
    workspace = ws_ptr.to(tl.pointer_type(tl.int32))
    ticket = tl.atomic_add(workspace, 1, sem="relaxed")
    semaphores = workspace + 1
    dq_acc = DQ
"""
_UNORDERED_ENTRY = """
    ticket = tl.program_id(0)
    semaphores = DELTA
    dq_acc = DELTA
"""

_DQ = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO", "OUT")}}
    # as the dk/dv kernel; OUT: [batch, q_heads, q_len, HEAD_DIM]; DELTA is written here; the output is dq
    # one program per q tile, the last q tile first: under a causal mask it is the longest
"""
_DQ_TAIL = """
    out_strides = ({{stride("OUT")}},)
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    section = pid // (SECTION * n_q)
    width = tl.minimum(SECTION, batch * q_heads - section * SECTION)
    place = pid - section * SECTION * n_q
    q_tile = n_q - 1 - place // width
    head = section * SECTION + place % width
    b = head // q_heads
    hq = head % q_heads
    dq = dq_tile(
        Q, K, V, OUT, DO, LSE, DELTA,
        q_strides, k_strides, v_strides, out_strides, do_strides, lse_strides,
        b, hq, q_tile, q_heads, q_len, kv_len, lo, hi, SCALE,
        BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, GROUP, HAS_LO, HAS_HI, EVEN_Q, EVEN_KV,
        PRECISION, STAGES, INDEX_DTYPE,
    )
    idx_m = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX_DTYPE)[:, None]
    idx_d = tl.arange(0, BLOCK_D)[None, :]
    inside = (idx_m < q_len) & (idx_d < HEAD_DIM)
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m", "idx_d"), "dq", "inside", val_shape=("BLOCK_Q", "BLOCK_D"))}}
"""

# One pass needs delta beforehand.  Inductor's own reductions will not do: how they add depends on sizes and layout.
_DELTA = """{{def_kernel("DO", "OUT")}}
    # DO, OUT: [batch, q_heads, q_len, HEAD_DIM]; the output is delta: [batch, q_heads, q_len], which the dk/dv kernel
    # does not read in rows that see no key
    q_heads = {{size("DO", 1)}}
    q_len = {{size("DO", 2)}}
    do_strides = ({{stride("DO")}},)
    out_strides = ({{stride("OUT")}},)
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    b = pid // n_q // q_heads
    hq = pid // n_q % q_heads
    idx_m = pid % n_q * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX_DTYPE)
    delta, _ = delta_tile(OUT, DO, out_strides, do_strides, b, hq, idx_m, 0, q_len, HEAD_DIM, BLOCK_D, EVEN_Q)
    inside = idx_m < q_len
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m"), "delta", "inside", val_shape=("BLOCK_Q",))}}
"""


@functools.cache
def _functions(module: str) -> str:
    """The `triton.jit` functions of kernels/<module>.py, without its imports and docstring."""
    text = resources.files(__package__).joinpath(f"{module}.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return "\n\n".join("\n".join(lines[f.decorator_list[0].lineno - 1 : f.end_lineno]) for f in functions) + "\n"


@functools.cache
def dkdv_template(schedule: str, has_lo: bool, has_hi: bool) -> str:
    """Template text of the dk/dv kernel; with any schedule but "two_pass" it also accumulates dq in order."""
    ordered = schedule != "two_pass"
    generated = codegen.triton_source(schedule, _shape_of(has_lo, has_hi))
    head = _DKDV_HEAD % {"dq_argument": ', "DQ"' if ordered else ""}
    body = head + (_ORDERED_ENTRY if ordered else _UNORDERED_ENTRY) + _COMMON + _DKDV_TAIL
    return "\n\n".join((body, generated, _functions("tiles"), _functions("ordering"), _functions("dkdv")))


@functools.cache
def dq_template(has_lo: bool, has_hi: bool) -> str:
    """Template text of the dq kernel of the two-pass backward."""
    generated = codegen.triton_source("two_pass", _shape_of(has_lo, has_hi))
    return "\n\n".join(
        (_DQ + _COMMON + _DQ_TAIL, generated, _functions("tiles"), _functions("delta"), _functions("dq"))
    )


@functools.cache
def delta_template() -> str:
    """Template text of the delta kernel of the ordered, single-pass backward."""
    return "\n\n".join((_DELTA, _functions("tiles"), _functions("delta")))


def _shape_of(has_lo: bool, has_hi: bool) -> Band:
    """Any band with these bounds: generated code depends on which bounds exist, their values are arguments."""
    return Band(0 if has_lo else None, 0 if has_hi else None)


def compile_time_values(
    plan: Plan,
    tiles: Tiles,
    mask: Band,
    scale: float,
    head_dim: int,
    group: int,
    lengths: tuple[Any, Any],
    *,
    even_q: bool,
    even_kv: bool,
    interpret: bool,
) -> dict[str, Any]:
    """The constexpr values of a kernel (`ORDERED` and `PARTS` of the dk/dv kernel come on top).

    Args:
        lengths: q_len and kv_len, integers or sympy's.
        even_q, even_kv: no tile reaches past q_len, past kv_len.
    """
    every_row, every_key = geometry.all_seen(mask, *lengths)
    return {
        "BLOCK_Q": tiles.block_q,
        "BLOCK_KV": tiles.block_kv,
        "STAGES": tiles.num_stages,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
        "GROUP": group,
        "SCALE": scale,
        "HAS_LO": mask.lo is not None,
        "HAS_HI": mask.hi is not None,
        "LO": mask.lo or 0,
        "HI": mask.hi or 0,
        "BOTTOM_RIGHT": mask.anchor == "bottom_right",
        "EVEN_Q": even_q and every_row,
        "EVEN_KV": even_kv and every_key,
        "SECTION": plan.section,
        "PRECISION": "'tf32'" if plan.tf32 else "'ieee'",
        "INTERPRET": interpret,
    }
