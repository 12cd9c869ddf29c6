"""Builds the work list of a forward over packed documents on the device, see `schedule.document_tiles`.

The padded rows of packed documents are cut into *slots* of ALIGNMENT rows, each of which belongs to one document. A
document has at most one q tile per slot, so slot i of a document stands for its q tile i, counted from the end.
`measure_documents` computes the entries of all slots, and `order_q_tiles` puts those that exist into the list.

All arithmetic is on integers, and no program reads what another program of the same kernel writes.
"""

import triton
import triton.language as tl

from ....schedule import document_tiles

WORDS, NOWHERE = tl.constexpr(document_tiles.WORDS), tl.constexpr(document_tiles.NOWHERE)


@triton.jit
def _of_slots(
    slots, number, Q_SEGMENT_IDS, KV_SEGMENT_IDS, TOKEN_COUNTS, ids_i, ids_j, ALIGNMENT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns (first row of the document, tokens in the slot, whether it lies behind the last document) of some
    slots.
    """
    exists = slots < number
    row = slots.to(tl.int64) * ALIGNMENT
    first = tl.load(KV_SEGMENT_IDS + row * ids_j, mask=exists, other=-1).to(tl.int32)
    outside = tl.load(Q_SEGMENT_IDS + row * ids_i, mask=exists, other=-1).to(tl.int32) != first
    tokens = tl.zeros_like(slots)
    for i in tl.static_range(ALIGNMENT // ROW_BLOCK):
        tokens += tl.load(TOKEN_COUNTS + slots * (ALIGNMENT // ROW_BLOCK) + i, mask=exists, other=0)
    return first, tokens, outside


@triton.jit(do_not_specialize=["number", "lo", "hi"])
def measure_documents(
    Q_SEGMENT_IDS, KV_SEGMENT_IDS, TOKEN_OFFSETS, TOKEN_COUNTS, ENTRIES, STEPS, ids_i, ids_j, number, lo, hi,
    KV_RANGE: tl.constexpr, CONSUMERS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_KV: tl.constexpr,
    ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the entry of each slot's q tile, and the number of kv tiles that the q tile visits, 0 if there is none.

    One program per BLOCK slots.  Q_SEGMENT_IDS, KV_SEGMENT_IDS: integers [rows] with strides ids_i and ids_j, and
    TOKEN_OFFSETS, TOKEN_COUNTS, as `model.VarlenLayout` defines them.  ENTRIES: int32 [slots, WORDS], see
    `schedule.document_tiles.QTile`; STEPS: int32 [slots].  number: of slots; lo, hi: the bounds of the band; KV_RANGE:
    a function of the schedule, as `dash_kv_range`, for a `document_band`.
    """
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, _tokens, outside = _of_slots(
        slots, number, Q_SEGMENT_IDS, KV_SEGMENT_IDS, TOKEN_COUNTS, ids_i, ids_j, ALIGNMENT, ROW_BLOCK
    )
    length = tl.zeros_like(slots)
    for begin in range(0, number, BLOCK):
        of_others, theirs, _ = _of_slots(
            begin + tl.arange(0, BLOCK), number, Q_SEGMENT_IDS, KV_SEGMENT_IDS, TOKEN_COUNTS, ids_i, ids_j, ALIGNMENT,
            ROW_BLOCK,
        )  # fmt: skip
        length += tl.sum(tl.where(of_others[None, :] == first[:, None], theirs[None, :], 0), 1)
    q_tile = slots - first // ALIGNMENT
    blocks = tl.cdiv(length, ROW_BLOCK)
    first_block = blocks - (q_tile + 1) * CONSUMERS
    exists = (slots < number) & (first_block + CONSUMERS > 0)
    band = length, length, tl.where(outside, NOWHERE, lo), hi
    kv, _, _, _ = KV_RANGE(tl.maximum(first_block, 0), band, ROW_BLOCK, BLOCK_KV)
    _, _, _, end = KV_RANGE(first_block + CONSUMERS - 1, band, ROW_BLOCK, BLOCK_KV)
    end = tl.maximum(end, 1)
    tl.store(STEPS + slots, tl.where(exists, end - tl.minimum(kv, end - 1), 0), mask=slots < number)
    token = tl.load(TOKEN_OFFSETS + first // ROW_BLOCK, mask=exists, other=0)
    tl.store(ENTRIES + slots * WORDS, first_block, mask=exists)
    tl.store(ENTRIES + slots * WORDS + 1, token, mask=exists)
    tl.store(ENTRIES + slots * WORDS + 2, first, mask=exists)
    tl.store(ENTRIES + slots * WORDS + 3, tl.where(outside, -length, length), mask=exists)


@triton.jit(do_not_specialize=["number"])
def order_q_tiles(ENTRIES, STEPS, LIST, number, BLOCK: tl.constexpr):
    """Writes the work list, int32 [1 + slots, WORDS]: the number of q tiles, then their entries, most kv tiles first.

    Among equals the order of the slots remains.  One program per BLOCK slots; the arguments are those of
    `measure_documents`.
    """
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.load(STEPS + slots, mask=slots < number, other=0)
    before = tl.zeros_like(slots)
    count = 0
    for begin in range(0, number, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        theirs = tl.load(STEPS + others, mask=others < number, other=0)
        count += tl.sum((theirs > 0).to(tl.int32), 0)
        earlier = (theirs[None, :] > steps[:, None]) | (
            (theirs[None, :] == steps[:, None]) & (others[None, :] < slots[:, None])
        )
        before += tl.sum(earlier.to(tl.int32), 1)
    for i in tl.static_range(WORDS):
        value = tl.load(ENTRIES + slots * WORDS + i, mask=steps > 0, other=0)
        tl.store(LIST + (1 + before) * WORDS + i, value, mask=steps > 0)
    if tl.program_id(0) == 0:
        word = tl.arange(0, WORDS)
        tl.store(LIST + word, tl.where(word == 0, count, 0))
