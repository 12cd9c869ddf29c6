"""`model.relations.CONGRUENT` on devices: a query sees the keys of an arithmetic progression of positions.

Note [Progressions]
    A progression has a first position, which is below its step, and the step ``2**s * odd``.  An element is tested
    without a division (Granlund and Montgomery 1994; Lemire, Kaser and Kurz 2019).  Modulo ``2**32`` an odd number has
    an inverse, and ``y = (key - first) * inverse`` takes every value for a single key.  It is ``i * 2**s`` for the i-th
    key of the progression, and these values belong to no other key.

    Positions are below ``2**30``.  With the smallest ``2**n`` such that ``2**n * step`` is at least that, the first
    ``2**n`` keys of the progression include all that there are, and lie below ``2**31``.  So a query sees the keys
    whose y has no bits but n of them, from bit s on.

    The vectors are `start`, which is ``-first * inverse``, `inverse`, and `others`, all other bits: a query sees the
    keys for which ``(key * inverse + start) & others`` is 0.  These are exact for steps from 1 to ``2**30``.  Larger
    steps count as ``2**30``: there is one key at most.  Neither the band nor other components are in the vectors.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .form import FAR, Form, Vectors, load_positions, load_vector

if TYPE_CHECKING:
    from ...mask_data import MaskData

LARGEST_STEP = 2**30
"""More than the distance between any two positions."""
LARGEST = tl.constexpr(LARGEST_STEP)


def _progressions(of: Vectors, data: "MaskData") -> tuple[Tensor, Tensor]:
    """Computes the vectors; a first position past the end is `kv_len`, since the query then sees no key."""
    number, step = (of.values[role].long() for role in ("number", "step"))
    step = step.abs().clamp(min=1)
    first = (number % step).clamp(max=data.kv_len)
    vectors = torch.stack(encoded(first, step.clamp(max=LARGEST_STEP)), 1)
    return vectors, torch.empty(data.batch, 0, data.kv_len, dtype=torch.int32, device=data.device)


def encoded(first: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the vectors `start`, `inverse` and `others` of Note [Progressions], int32 of the shape of the operands.

    first: int64, below the step, or any number from 0 to ``2**30`` with the step ``2**30``.  step: int64, from 1 to
    ``2**30``.
    """
    lowest = step & -step
    odd = step // lowest
    inverse = 3 * odd ^ 2  # modulo 2**5; every line below has twice as many correct bits
    for _ in range(3):
        inverse = inverse * (2 - odd * inverse) & 0xFFFFFFFF
    below = step
    for bits in (1, 2, 4, 8, 16):
        below = below | below >> bits
    keys = LARGEST_STEP // (below // 2 + 1)  # 2**n, and the divisor is the largest power of two that is not above step
    start, others = -first * inverse, ~(lowest * (keys - 1))
    return start.to(torch.int32), inverse.to(torch.int32), others.to(torch.int32)


@triton.jit
def _load_queries(side, row, tokens, exists):
    """Queries that do not exist see the position `FAR` alone, which no key has."""
    start = load_vector(side, row, tokens, exists, -FAR)
    return start, load_vector(side, row + 1, tokens, exists, 1), load_vector(side, row + 2, tokens, exists, -1)


@triton.jit
def _test(shown, queries, keys):
    return shown & (((keys[0] * queries[1] + queries[0]) & queries[2]) == 0)


@triton.jit
def _progression(queries):
    """Returns the first position and the step, int32; the step is `LARGEST` if the query sees one key at most."""
    start, inverse, others = queries
    odd = (3 * inverse) ^ 2
    for _ in tl.static_range(3):
        odd = odd * (2 - inverse * odd)
    inside = ~others
    lowest = inside & -inside
    return -start * odd, tl.where(lowest == 0, LARGEST, lowest * odd)


@triton.jit
def _classify(queries, rows_exist, keys, columns_exist):
    """The result is exact: a tile's keys are contiguous, and a complete tile has more than one."""
    first, step = _progression(queries)
    least = tl.min(tl.where(columns_exist, keys[0], FAR), 1)
    most = tl.max(tl.where(columns_exist, keys[0], -1), 1)
    all_first = tl.max(tl.where(rows_exist, first, -1), 1)[None, :]
    largest_step = tl.max(tl.where(rows_exist, step, 1), 1)[None, :]
    KV_TILES: tl.constexpr = least.shape[0]
    tiles = tl.arange(0, KV_TILES)
    some = tl.zeros([KV_TILES, first.shape[0]], tl.int1)
    for i in tl.static_range(KV_TILES):
        from_, to = tl.min(tl.where(tiles == i, least, FAR), 0), tl.max(tl.where(tiles == i, most, -1), 0)
        last = to - (to - first) % step  # the last position up to `to` that a row sees, if it sees one
        meets = tl.max(((first <= to) & (from_ <= last)).to(tl.int32), 1) != 0
        some = some | ((tiles == i)[:, None] & meets[None, :])
    return some == 0, (largest_step == 1) & (all_first <= least[:, None]), some


@gluon.jit
def _keep(s, queries, keys):
    return keep_progression(s, keys[0], queries[0], queries[1], queries[2])


@gluon.jit
def keep_progression(s, keys, start, inverse, others):
    """Returns the scores `s` whose keys are in the progression of Note [Progressions], else -inf.

    It is one inline assembly operation, as `_keep_below` in `hopper.forward.device.steps`.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %keep;
        .reg .b32 %bits;
        mad.lo.s32 %bits, $2, $4, $3;
        and.b32 %bits, %bits, $5;
        setp.eq.s32 %keep, %bits, 0;
        selp.f32 $0, $1, 0fFF800000, %keep;
        }""",
        "=f,f,r,r,r,r",
        [s, keys, start, inverse, others],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


PROGRESSIONS = Form(
    "progressions", 3, 0, _progressions, _load_queries, load_positions, _test, _classify, _keep, reads_positions=True
)
"""A query sees the keys at positions ``first + i * step`` for i >= 0, see Note [Progressions]."""

FORMS = PROGRESSIONS, PROGRESSIONS
