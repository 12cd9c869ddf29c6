"""Assembles the text of a portable kernel: template body, device functions, and the schedule's generated functions.

A body is Inductor template text (`def_kernel`, `size`, `stride`, `store_output` are its hooks); `standalone.py` renders
the same text without Inductor, so what is compiled in tests is what Inductor compiles.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, NamedTuple

from ...errors import ArgumentError
from ...model.attention_spec import AttentionSpec
from ...model.dropout import ROUNDS
from ...model.mask import ROW_BLOCK
from ...model.operands import ADDED, OPERANDS
from ...model.plan import Plan, Tiles
from ...model.relations import Relation
from ...model.traits import Traits
from ...schedule import codegen, geometry
from ..common import score
from ..family import padded

# Compile-time values: Note [Argument groups] in groups.py.
_GROUPS = f"""
    TILE: tl.constexpr = Tile(BLOCK_Q, BLOCK_KV, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, GROUP, EVEN_Q, EVEN_KV)
    MASK: tl.constexpr = Mask(HAS_LO, HAS_HI, HAS_KEYS, %(by_pair)s, %(relations)s, VARLEN_ROWS)
    SCORE: tl.constexpr = Score({", ".join(score.CONSTANTS)}, HAS_BIAS, ROUNDS, HAS_GRAD_LSE, HAS_SINKS)
    BUILD: tl.constexpr = Build(PRECISION, STAGES, INDEX_DTYPE, INTERPRET)
"""

# Lengths: of tokens that are rows, and of a mask of rows.
_TOKENS_ARE_ROWS = """
    q_len = {{size("Q", 2)}}
    kv_len = {{size("K", 2)}}
    varlen_layout = VarlenLayout(LSE, LSE, {{size("Q", 2)}})
"""
_VARLEN = """
    q_len = {{size("TOKEN_OFFSETS", 0)}} * VARLEN_ROWS
    kv_len = q_len
    varlen_layout = VarlenLayout(TOKEN_OFFSETS, TOKEN_COUNTS, {{size("Q", 2)}})
"""

_OPERANDS = """
    batch = {{size("Q", 0)}}
    q_heads = {{size("Q", 1)}}
    heads = {{size("K", 1)}}
    lo = LO
    hi = HI
    if BOTTOM_RIGHT:
        lo = LO - (kv_len - q_len)
        hi = HI - (kv_len - q_len)
    tile_schedule = (q_len, kv_len, lo, hi)
    query = Operand(Q, ({{stride("Q")}},))
    key = Operand(K, ({{stride("K")}},))
    value = Operand(V, ({{stride("V")}},))
    inputs = Inputs(query, key, value)
    lse = Operand(LSE, ({{stride("LSE")}},))
"""
_GRADIENT = """
    saved = Saved(Operand(DO, ({{stride("DO")}},)), lse, DELTA, heads)
"""

# What a mask reads: Note [Data operands] in groups.py.  A tensor is an input only of kernels that read it.
_OPERAND = 'Operand(%(name)s, ({{stride("%(name)s")}},))'

_DROP = """
    drop = Dropout(tl.load(SEED), THRESHOLD, RESCALE)
"""
_NO_DROP = """
    drop = Dropout(0, 0, 1.0)
"""

_DATA = """
    of_queries = %(queries)s
    of_keys = %(keys)s
    of_pairs = %(pairs)s
    added = Added%(added)s
    data = Data(%(valid)s, of_queries, of_keys, of_pairs, added, varlen_layout, drop)
"""

_DKDV_HEAD = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO", "DV"%(arguments)s)}}
    # Q: [batch, q_heads, q_len, HEAD_DIM]; K and the output (dk): [batch, heads, kv_len, HEAD_DIM]
    # DO: [batch, q_heads, q_len, VALUE_DIM]; V, DV: [batch, heads, kv_len, VALUE_DIM]
    # LSE: [batch, q_heads, >= q_len] natural log; DELTA: [batch, q_heads, q_len] rowsum(out * do)
    # lo <= q - kv <= hi is the mask (bounds exist where HAS_LO, HAS_HI); HEAD_CHUNK heads are launched together
"""

_DKDV_TAIL = """
    dv_operand = Operand(DV, ({{stride("DV")}},))
    head, cta_index = dash_launch(work_id, batch * heads, tile_schedule, BLOCK_Q, BLOCK_KV, HEAD_CHUNK)
    b = head // heads
    h = head % heads
    for part in range(PARTS):
        kv = dash_kv_tile(cta_index, part, tile_schedule, BLOCK_Q, BLOCK_KV)
        dk, dv = dkdv_tile(
            inputs, saved, accumulator, data, b, h, kv, tile_schedule, ORDERED, TILE, MASK, SCORE, BUILD
        )
        dk = dk * SCALE
        idx_n, exists = place_rows(data, numbers_of(kv, BLOCK_KV, BUILD), kv_len, MASK)
        idx_n = idx_n[:, None]
        idx_d = tl.arange(0, BLOCK_D).to(INDEX_DTYPE)[None, :]
        inside = exists[:, None] & (idx_d < HEAD_DIM)
        idx_dv = tl.arange(0, BLOCK_DV).to(INDEX_DTYPE)[None, :]
        dv_head = head_of(dv_operand, b, h)
        dv_ptrs = dv_head.start + idx_n * dv_head.strides[0] + idx_dv * dv_head.strides[1]
        tl.store(dv_ptrs, dv.to(DV.dtype.element_ty), mask=exists[:, None] & (idx_dv < VALUE_DIM))
        idx_b = b.to(INDEX_DTYPE)
        idx_h = h.to(INDEX_DTYPE)
        {{store_output(("idx_b", "idx_h", "idx_n", "idx_d"), "dk", "inside", indent_width=8,
                       val_shape=("BLOCK_KV", "BLOCK_D"))}}
"""

# One pass: work id and semaphores are the workspace, see Note [Forward progress] in ordering.py.
_ORDERED_ENTRY = """
    workspace = ws_ptr.to(tl.pointer_type(tl.int32))
    work_id = tl.atomic_add(workspace, 1, sem="relaxed")
    accumulator = Accumulator(DQ, workspace + 1)
"""
_UNORDERED_ENTRY = """
    work_id = tl.program_id(0)
    accumulator = Accumulator(DELTA, DELTA)
"""

_DQ = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO", "OUT"%(arguments)s)}}
    # as the dk/dv kernel; OUT: [batch, q_heads, q_len, VALUE_DIM]; DELTA is written here; the output is dq
    # one program per q tile, the last q tile first: under a causal mask it is the longest
"""
_NO_SUMS = """
    sums = Sums(DELTA, 1, 1, Operand(DELTA, (0, 0)))
"""
_Q_PROGRAM = """
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    head_chunk = pid // (HEAD_CHUNK * n_q)
    width = tl.minimum(HEAD_CHUNK, batch * q_heads - head_chunk * HEAD_CHUNK)
    place = pid - head_chunk * HEAD_CHUNK * n_q
    q_tile = n_q - 1 - place // width
    head = head_chunk * HEAD_CHUNK + place % width
    b = head // q_heads
    hq = head % q_heads
"""
_DQ_TAIL = """
    dq = dq_tile(inputs, made, saved, data, b, hq, q_tile, tile_schedule, sums, GRADIENT, ADDS, TILE, MASK, SCORE,
        BUILD)
    idx_m, exists = place_rows(data, numbers_of(q_tile, BLOCK_Q, BUILD), q_len, MASK)
    idx_m = idx_m[:, None]
    idx_d = tl.arange(0, BLOCK_D).to(INDEX_DTYPE)[None, :]
    inside = exists[:, None] & (idx_d < HEAD_DIM)
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m", "idx_d"), "dq", "inside", val_shape=("BLOCK_Q", "BLOCK_D"))}}
"""

# The dq kernel of a call whose bias has a gradient, where the bias is shared by few enough.
_DQ_BIAS = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO", "OUT", "DBIAS"%(arguments)s)}}
    # as the dq kernel; DBIAS: [batch or 1, q_heads or 1, q_len, kv_len] is written here, summed where it has 1
    # SUMS, where something is summed: fp32 [planes of DBIAS, q tiles, kv tiles, BLOCK_Q * BLOCK_KV]
    # one program per q tile of a plane of DBIAS, for all batch elements and heads that share it
"""
_PLANE_PROGRAM = """
    own_batch = batch
    own_heads = q_heads
    b_turns = 1
    hq_turns = 1
    if SUMS_BATCH:
        own_batch = 1
        b_turns = batch
    if SUMS_HEADS:
        own_heads = 1
        hq_turns = q_heads
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    head_chunk = pid // (HEAD_CHUNK * n_q)
    width = tl.minimum(HEAD_CHUNK, own_batch * own_heads - head_chunk * HEAD_CHUNK)
    place = pid - head_chunk * HEAD_CHUNK * n_q
    q_tile = n_q - 1 - place // width
    plane = head_chunk * HEAD_CHUNK + place % width
    b_first = plane // own_heads
    hq_first = plane % own_heads
"""
_PLANE_SUMS = """
    plane_sums = SUMS + plane.to(tl.int64) * n_q * tl.cdiv(kv_len, BLOCK_KV) * (BLOCK_Q * BLOCK_KV)
"""
_NO_PLANE_SUMS = """
    plane_sums = DELTA
"""
_DQ_BIAS_TAIL = """
    gradient = head_of(Operand(DBIAS, ({{stride("DBIAS")}},)), b_first, hq_first)
    for turn in range(b_turns * hq_turns):
        b = b_first + turn // hq_turns
        hq = hq_first + turn % hq_turns
        begins = turn == 0
        ends = turn == b_turns * hq_turns - 1
        sums = Sums(plane_sums, begins, ends, gradient)
        dq = dq_tile(inputs, made, saved, data, b, hq, q_tile, tile_schedule, sums, GRADIENT, ADDS, TILE, MASK,
            SCORE, BUILD)
        idx_m = numbers_of(q_tile, BLOCK_Q, BUILD)[:, None]
        idx_d = tl.arange(0, BLOCK_D).to(INDEX_DTYPE)[None, :]
        inside = (idx_m < q_len) & (idx_d < HEAD_DIM)
        idx_b = b.to(INDEX_DTYPE)
        idx_h = hq.to(INDEX_DTYPE)
        {{store_output(("idx_b", "idx_h", "idx_m", "idx_d"), "dq", "inside", indent_width=8,
                       val_shape=("BLOCK_Q", "BLOCK_D"))}}
        tl.debug_barrier()  # what one thread has added to SUMS, another one may read
    if HAS_LO or HAS_HI:
        zero_unseen(gradient, q_tile, tile_schedule, TILE, BUILD)
"""

_FORWARD = """{{def_kernel("Q", "K", "V", "LSE"%(arguments)s)}}
    # Q: [batch, q_heads, q_len, HEAD_DIM]; K: [batch, heads, kv_len, HEAD_DIM]; V: [batch, heads, kv_len, VALUE_DIM]
    # LSE: [batch, q_heads, q_len or, with a bias, 2 * q_len] natural log, written here
    # the output is [batch, q_heads, q_len, VALUE_DIM]
    # lo <= q - kv <= hi is the mask; one program per q tile, as in the dq kernel
"""
_FORWARD_TAIL = """
    out, sums, excess = attend_tile(inputs, data, sinks, b, hq, q_tile, tile_schedule, SIGN, SLOPE, TILE, MASK,
        SCORE, BUILD)
    q_rows = numbers_of(q_tile, BLOCK_Q, BUILD)
    lse_head = head_of(lse, b, hq)
    tl.store(lse_head.start + q_rows * lse_head.strides[0], sums, mask=q_rows < q_len)
    if HAS_BIAS:
        tl.store(lse_head.start + (q_len + q_rows) * lse_head.strides[0], excess, mask=q_rows < q_len)
    idx_m, exists = place_rows(data, q_rows, q_len, MASK)
    idx_m = idx_m[:, None]
    idx_d = tl.arange(0, BLOCK_DV).to(INDEX_DTYPE)[None, :]
    inside = exists[:, None] & (idx_d < VALUE_DIM)
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m", "idx_d"), "out", "inside", val_shape=("BLOCK_Q", "BLOCK_DV"))}}
"""

_BIAS_GRADIENT = """{{def_kernel("Q", "K", "V", "LSE", "DELTA", "DO"%(arguments)s)}}
    # the output is [batch or 1, q_heads or 1, q_len, kv_len], summed where it has 1; one program per tile of pairs
"""
_BIAS_GRADIENT_TAIL = """
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    n_kv = tl.cdiv(kv_len, BLOCK_KV)
    kv = pid % n_kv
    q_tile = pid // n_kv % n_q
    plane = pid // n_kv // n_q
    b_turns = 1
    hq_turns = 1
    own_heads = q_heads
    if SUMS_BATCH:
        b_turns = batch
    if SUMS_HEADS:
        hq_turns = q_heads
        own_heads = 1
    b = plane // own_heads
    hq = plane % own_heads
    gradient = bias_gradient_tile(
        inputs, saved, data, (b, hq), (b_turns, hq_turns), q_tile, kv, tile_schedule, TILE, MASK, SCORE, BUILD
    )
    # not `numbers_of`: the tile has these already, and they would stay in registers during its loop
    idx_m = q_tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(INDEX_DTYPE)[:, None]
    idx_n = kv * BLOCK_KV + tl.arange(0, BLOCK_KV).to(INDEX_DTYPE)[None, :]
    inside = (idx_m < q_len) & (idx_n < kv_len)
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m", "idx_n"), "gradient", "inside", val_shape=("BLOCK_Q", "BLOCK_KV"))}}
"""

# One pass needs delta beforehand.  Inductor's own reductions will not do: how they add depends on sizes and layout.
_DELTA = """{{def_kernel("DO", "OUT"%(arguments)s)}}
    # DO, OUT: [batch, q_heads, q_len or tokens, VALUE_DIM]; the output is delta: [batch, q_heads, q_len], which the
    # dk/dv kernel does not read in rows that see no key
    q_heads = {{size("DO", 1)}}
    %(lengths)s
    %(groups)s
    do = Operand(DO, ({{stride("DO")}},))
    %(made)s
    pid = tl.program_id(0)
    n_q = tl.cdiv(q_len, BLOCK_Q)
    b = pid // n_q // q_heads
    hq = pid // n_q %% q_heads
    idx_m = numbers_of(pid %% n_q, BLOCK_Q, BUILD)
    tokens, exists = tokens_of(%(offsets)s, idx_m, q_len, VARLEN_ROWS)
    queries = TileRows(idx_m, 0, q_len, tokens, exists)
    delta, _ = delta_tile(made, do, b, hq, queries, TILE, MASK, SCORE)
    inside = idx_m < q_len
    idx_b = b.to(INDEX_DTYPE)
    idx_h = hq.to(INDEX_DTYPE)
    {{store_output(("idx_b", "idx_h", "idx_m"), "delta", "inside", val_shape=("BLOCK_Q",))}}
"""


class Sizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        q_len, kv_len: the lengths of the mask, integers or sympy expressions.
        head_dim, value_dim: the head dims of q and k, and of v.
        group: the number of query heads per kv head.
    """

    q_len: Any
    kv_len: Any
    head_dim: int
    value_dim: int
    group: int


_DEVICE_CODE = (f"{__package__}.device", f"{__package__.rpartition('.')[0]}.common.device")


@functools.cache
def _definitions(module: str) -> str:
    """Returns the functions and classes of a device module as text, without its imports and module docstring."""
    files = (device.joinpath(f"{module}.py") for device in map(resources.files, _DEVICE_CODE))
    text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
    lines = text.splitlines()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    begins = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in found]
    parts = (lines[begin - 1 : node.end_lineno] for begin, node in zip(begins, found, strict=True))
    return "\n\n".join(map("\n".join, parts)) + "\n"


@functools.cache
def dkdv_template(schedule: str, traits: Traits) -> str:
    """Returns the template text of the dk/dv kernel.

    With any schedule but "two_pass" the kernel also accumulates dq, in order.
    """
    ordered = schedule != "two_pass"
    data, operands = _data(traits, sums_keys=ordered)
    head = _head(_DKDV_HEAD, *(["DQ"] if ordered else []), *operands)
    entry = _ORDERED_ENTRY if ordered else _UNORDERED_ENTRY
    body = head + entry + _operands(traits) + _GRADIENT + data + _DKDV_TAIL
    return _with_functions(body, traits, "tiles", "ordering", "dkdv", schedule=schedule)


@functools.cache
def dq_template(traits: Traits) -> str:
    """Returns the template text of the dq kernel of the two-pass backward."""
    data, operands = _data(traits)
    head = _head(_DQ, *_of_rows(traits), *operands)
    body = head + _operands(traits) + _GRADIENT + _made(traits) + data + _Q_PROGRAM + _NO_SUMS + _DQ_TAIL
    return _with_functions(body, traits, "tiles", "delta", "bias_sums", "dq")


@functools.cache
def dq_bias_template(traits: Traits, *, adds: bool) -> str:
    """Returns the template text of the dq kernel that also computes the bias gradient.

    Args:
        adds: whether the gradient is a sum over batch elements or heads.
    """
    data, operands = _data(traits)
    head = _head(_DQ_BIAS, *(["SUMS"] if adds else []), *_of_rows(traits), *operands)
    sums = _PLANE_SUMS if adds else _NO_PLANE_SUMS
    body = head + _operands(traits) + _GRADIENT + _made(traits) + data + _PLANE_PROGRAM + sums + _DQ_BIAS_TAIL
    return _with_functions(body, traits, "tiles", "delta", "bias_sums", "dq")


@functools.cache
def forward_template(traits: Traits) -> str:
    """Returns the template text of the forward, which also writes the log-sum-exp, to its argument LSE."""
    data, operands = _data(traits)
    sinks = f"\n    sinks = {_operand('sinks', traits)}\n"
    head = _head(_FORWARD, *_of_rows(traits), *operands)
    body = head + _operands(traits) + data + sinks + _Q_PROGRAM + _FORWARD_TAIL
    return _with_functions(body, traits, "tiles", "attend")


@functools.cache
def bias_gradient_template(traits: Traits) -> str:
    """Returns the template text of the kernel that computes only the bias gradient."""
    data, operands = _data(traits)
    body = _head(_BIAS_GRADIENT, *operands) + _operands(traits) + _GRADIENT + data + _BIAS_GRADIENT_TAIL
    return _with_functions(body, traits, "tiles", "bias_gradient")


@functools.cache
def delta_template(varlen: bool = False, grad_logsumexp: bool = False) -> str:
    """Returns the template text of the delta kernel of the ordered, single-pass backward.

    Args:
        varlen: whether the operands are packed tokens.
        grad_logsumexp: whether the log-sum-exp has a gradient, which delta includes.
    """
    traits = Traits(operands=("grad_logsumexp",) * grad_logsumexp)
    arguments = _of_rows(traits)
    lengths, offsets = 'q_len = {{size("DO", 2)}}', "DO, DO"
    if varlen:
        lengths, offsets = 'q_len = {{size("TOKEN_OFFSETS", 0)}} * VARLEN_ROWS', "TOKEN_OFFSETS, TOKEN_COUNTS"
        arguments += ["TOKEN_OFFSETS", "TOKEN_COUNTS"]
    named = "".join(f', "{name}"' for name in arguments)
    parts = {
        "arguments": named,
        "lengths": lengths,
        "offsets": offsets,
        "groups": _groups(Traits()),
        "made": _made(traits).strip(),
    }
    body = _DELTA % parts
    return "\n\n".join((body, _device("tiles", "delta")))


def _with_functions(body: str, traits: Traits, *modules: str, schedule: str = "two_pass") -> str:
    """Returns the body with the schedule's functions and those of these modules, including dropout where it is used."""
    generated = codegen.triton_source(schedule, traits.band)
    tests = [_relation(test) for test in dict.fromkeys(relation.test for relation in _relations(traits))]
    dropout = ["dropout"] if traits.reads("dropout") else []
    return "\n\n".join((body, generated, *tests, _device(*modules, *dropout)))


def _relations(traits: Traits) -> list[Relation]:
    """Returns the relations of queries and keys, in the order of `Mask.RELATIONS`."""
    return [kind.RELATION for kind in traits.kinds if kind.RELATION.queries]


@functools.cache
def _relation(test: Callable[..., Any]) -> str:
    """Returns the test of a relation as a device function."""
    return "@triton.jit\n" + inspect.getsource(test)


def _device(*modules: str) -> str:
    """Returns the text of the argument groups and of the functions of these modules."""
    added = "".join(f"    {name}: object\n" for name in ADDED)
    head = f"from typing import NamedTuple\n\n\nclass Added(NamedTuple):\n{added}"
    return "\n\n".join((head, *map(_definitions, ("groups", "rows", "score", *modules))))


def reads_keys(traits: Traits, *, sums_keys: bool = True) -> bool:
    """Returns whether a kernel reads a key validity vector, because the mask has one or because the kernel needs one.

    Args:
        sums_keys: whether the kernel sums over keys or values, times zero where a row does not see them.  Zero times
            NaN is NaN, so it must not read keys that no row sees; where elementwise masks decide which these are, a
            vector must mark them.  Only the two-pass dk/dv kernel, which sums over rows, has no such sum.
    """
    return any(kind.RELATION.is_of_keys for kind in traits.kinds) or (sums_keys and decided_by_pairs(traits))


def decided_by_pairs(traits: Traits) -> bool:
    """Returns whether it takes tests of single pairs to find the keys that no row sees; never with a varlen layout."""
    return _by_pair(traits) and not traits.varlen


def _by_pair(traits: Traits) -> bool:
    return any(kind.RELATION.queries or kind.RELATION.pairs for kind in traits.kinds)


def _groups(traits: Traits) -> str:
    """Returns the lines that define compile-time values."""
    tests = [relation.test.__name__ for relation in _relations(traits)]
    return _GROUPS % {"by_pair": _by_pair(traits), "relations": _tuple(tests)}


def _operands(traits: Traits) -> str:
    """Returns the lines that define compile-time values, lengths, operands and the band."""
    return _groups(traits) + (_VARLEN if traits.varlen else _TOKENS_ARE_ROWS) + _OPERANDS


def operand_names(traits: Traits) -> list[list[tuple[str, str]]]:
    """Returns, for each mask component in argument order, its operands as pairs (argument name, role).

    A key validity vector is left out: it is the argument KEYS.
    """
    kinds = [kind for kind in traits.kinds if not kind.RELATION.is_of_keys]
    return [[(f"{kind.NAME}_{role}".upper(), role) for role in kind.RELATION.roles] for kind in kinds]


def _operand(name: str, traits: Traits, other: str = "LSE") -> str:
    """Returns the text of an optional operand; one that the call does not have is another tensor, which is not read."""
    kind = OPERANDS[name]
    if traits.reads(name):
        return _OPERAND % {"name": kind.argument}
    return f"Operand({other}, {_tuple(['0'] * len(kind.axes))})"


def _of_rows(traits: Traits) -> list[str]:
    """Returns the arguments for operands of rows, which only kernels for rows have."""
    return [OPERANDS[name].argument for name in traits.operands if OPERANDS[name].changes == "rows"]


def _made(traits: Traits) -> str:
    """Returns the line that defines the inputs of delta."""
    return f"\n    made = Made({_OPERAND % {'name': 'OUT'}}, {_operand('grad_logsumexp', traits, 'OUT')})\n"


def _data(traits: Traits, *, sums_keys: bool = True) -> tuple[str, list[str]]:
    """Returns the lines that define the data of mask and scores, and the argument tensors, in argument order."""
    kinds = [kind for kind in traits.kinds if not kind.RELATION.is_of_keys]
    operands = [{role: name for name, role in names} for names in operand_names(traits)]
    has_keys = reads_keys(traits, sums_keys=sums_keys)
    of_pairs = [OPERANDS[name].argument for name in traits.operands if OPERANDS[name].changes != "rows"]

    def of_relations(side: str) -> list[list[str]]:
        found = [(getattr(kind.RELATION, side), names) for kind, names in zip(kinds, operands, strict=True)]
        return [[_OPERAND % {"name": names[role]} for role in roles] for roles, names in found]

    vectors = [kind.RELATION.queries != () for kind in kinds]
    queries, keys = (
        _tuple([_tuple(of) for of, is_vector in zip(of_relations(side), vectors, strict=True) if is_vector])
        for side in ("queries", "keys")
    )
    pairs = _tuple([operand for of in of_relations("pairs") for operand in of])
    added = _tuple([_operand(name, traits) if traits.reads(name) else "()" for name in ADDED])
    seen = _OPERAND % {"name": "KEYS"} if has_keys else "Operand(LSE, (0, 0, 0))"
    data = _DATA % {"queries": queries, "keys": keys, "pairs": pairs, "added": added, "valid": seen}
    names = [name for of_component in operands for name in of_component.values()]
    names += [*(["KEYS"] if has_keys else []), *of_pairs, *(["TOKEN_OFFSETS", "TOKEN_COUNTS"] if traits.varlen else [])]
    return (_DROP if traits.reads("dropout") else _NO_DROP) + data, names


def _tuple(parts: Sequence[str]) -> str:
    """Returns the text of a tuple."""
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _head(text: str, *arguments: str) -> str:
    """Returns the first lines of a body, with these arguments after those that it always has."""
    return text % {"arguments": "".join(f', "{name}"' for name in arguments)}


def compile_time_values(
    plan: Plan,
    tiles: Tiles,
    spec: AttentionSpec,
    sizes: Sizes,
    *,
    even: tuple[bool, bool],
    interpret: bool,
    sums_keys: bool = True,
) -> dict[str, Any]:
    """Returns the constexpr values of a kernel by name (the dk/dv kernel also needs `ORDERED` and `PARTS`).

    Args:
        even: whether q_len, and kv_len, are known to be multiples of the tile's lengths.
        interpret: whether the kernel is for Triton's interpreter.
        sums_keys: as for `reads_keys`.
    """
    traits, band, dropout = spec.traits, spec.mask.band, spec.dropout
    drops = {} if dropout is None else {"THRESHOLD": dropout.threshold, "RESCALE": dropout.rescale}
    every_row, every_key = geometry.all_seen(band, sizes.q_len, sizes.kv_len)
    return drops | {
        "BLOCK_Q": tiles.block_q,
        "BLOCK_KV": tiles.block_kv,
        "STAGES": tiles.num_stages,
        "HEAD_DIM": sizes.head_dim,
        "BLOCK_D": padded(sizes.head_dim),
        "VALUE_DIM": sizes.value_dim,
        "BLOCK_DV": padded(sizes.value_dim),
        "GROUP": sizes.group,
        **score.constants(spec),
        "HAS_LO": traits.has_lo,
        "HAS_HI": traits.has_hi,
        "HAS_KEYS": reads_keys(traits, sums_keys=sums_keys),
        "HAS_BIAS": traits.biased,
        "HAS_GRAD_LSE": traits.reads("grad_logsumexp"),
        "HAS_SINKS": traits.reads("sinks"),
        "ROUNDS": ROUNDS if traits.reads("dropout") else 0,
        "VARLEN_ROWS": ROW_BLOCK if traits.varlen else 0,
        "LO": band.lo or 0,
        "HI": band.hi or 0,
        "BOTTOM_RIGHT": band.anchor == "bottom_right",
        "EVEN_Q": even[0] and every_row,
        "EVEN_KV": even[1] and every_key,
        "HEAD_CHUNK": plan.head_chunk,
        "PRECISION": "'tf32'" if plan.tf32 else "'tf32x3'",
        "INTERPRET": interpret,
    }


def forward_constants(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the constexpr values of the forward in addition to `compile_time_values`.

    Raises:
        ArgumentError: fp32 cannot represent the scale, see `signed_slope`.
    """
    sign, slope = signed_slope(score.slope_after_score(spec))
    return {"SIGN": sign, "SLOPE": slope}


def bias_gradient_constants(summed: Sequence[int]) -> dict[str, Any]:
    """Returns the constexpr values of the bias gradient kernel in addition to `compile_time_values`.

    Args:
        summed: the dimensions, batch elements (0) and heads (1), over which the gradient is summed.
    """
    return {"SUMS_BATCH": 0 in summed, "SUMS_HEADS": 1 in summed}


def dq_constants(summed: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns the constexpr values of a dq kernel in addition to `compile_time_values`.

    Args:
        summed: as for `bias_gradient_constants` if the kernel also computes the bias gradient, else None.
    """
    of_bias = {} if summed is None else bias_gradient_constants(summed)
    return {"GRADIENT": summed is not None, "ADDS": bool(summed)} | of_bias


def bias_gradient_tiles(plan: Plan, traits: Traits) -> Tiles:
    """Returns the tiles of the kernel that computes only the bias gradient.

    The kernel also loads tiles of queries and of the bias ahead: more than two stages do not fit into shared memory,
    and where the dk/dv kernel has only one, there are no registers for two.  With a mask that is data, two stages of an
    fp32 bias do not fit either.
    """
    tiles = plan.dq or plan.dkdv
    stages = 1 if traits.components else 2
    return replace(tiles, num_stages=min(stages, tiles.num_stages, plan.dkdv.num_stages))


def dq_bias_tiles(plan: Plan) -> Tiles:
    """Returns the tiles of the dq kernel that also computes the bias gradient, which replace the plan's dq tiles.

    The kernel also loads bias tiles ahead; more than two stages fit into shared memory only with half as many keys.  In
    16 bits that changes no sum, because an instruction sums 16 keys for any tile size.
    """
    assert plan.dq is not None
    if plan.dq.num_stages > 2:
        return replace(plan.dq, block_kv=plan.dq.block_kv // 2)
    return replace(plan.dq, num_stages=min(2, plan.dq.num_stages, plan.dkdv.num_stages))


def signed_slope(scale: float) -> tuple[float, float]:
    """Splits the scale into (sign, slope): a product of query and key, times sign and slope, is its score in base 2.

    The sign is 1.0, -1.0 or 0.0 and the slope a positive fp32 value, so that the largest product times the slope is the
    largest score, rounded as every other.  A scale that is zero in fp32 has the sign 0.0 and the slope 1.0.

    Raises:
        ArgumentError: the scale, or its multiple by log2(e) in fp32, is not finite.
    """
    try:
        slope = float(struct.unpack("f", struct.pack("f", abs(scale) * math.log2(math.e)))[0])
    except OverflowError:
        slope = math.inf
    if not slope < math.inf:
        raise ArgumentError("scale", scale, "a finite number of magnitude 2e38 at most")
    return (math.copysign(1.0, scale), slope) if slope else (0.0, 1.0)
