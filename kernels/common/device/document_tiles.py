"""Builds the work list of a forward over documents on the device, see `schedule.document_tiles`.

The padded rows of packed documents are cut into *slots* of ALIGNMENT rows, each of which belongs to one document. A
document has at most one q tile per slot, so slot i of a document stands for its q tile i, counted from the end.
`measure_documents` computes the entries of all slots, and `order_q_tiles` puts those that exist into the list.

The documents of a mask begin anywhere.  `find_documents` finds them in each batch element, which has a
number of slots of its own, and `measure_documents_of_mask` gives the documents as many of them as they have q tiles.

All arithmetic is on integers, and no program reads what another program of the same kernel writes.
"""

import triton
import triton.language as tl

from ....schedule import document_tiles

WORDS, NOWHERE = tl.constexpr(document_tiles.WORDS), tl.constexpr(document_tiles.NOWHERE)

DOCUMENT = 3
"""int32 values that `find_documents` writes of a document: its first token, its length, and the q tiles before its
own."""
_DOCUMENT = tl.constexpr(DOCUMENT)


@triton.jit
def _of_slots(
    slots, number, Q_SEGMENT_IDS, KV_SEGMENT_IDS, TOKEN_COUNTS, ids_i, ids_j, ALIGNMENT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns (first row of the document, tokens in the slot, whether it is after the last document) of slots."""
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
    tl.store(ENTRIES + slots * WORDS + 4, 0, mask=exists)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["length", "slots"])
def find_documents(
    NUMBERS, DOCUMENTS, COUNTS, numbers_b, numbers_i, length, slots,
    CONSUMERS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the documents of a batch element, in order, and counts them and their q tiles.

    One program per batch element.  NUMBERS: integers [batch, length] with strides numbers_b and numbers_i, see Note
    [Documents of a mask] in `common.document_tiles`; DOCUMENTS: int32 [batch, slots, DOCUMENT]; COUNTS: int32 [batch,
    2], the number of q tiles and of documents, both 0 if these are no documents, or have more than `slots` q tiles.
    """
    b = tl.program_id(0).to(tl.int64)
    numbers, found = NUMBERS + b * numbers_b, DOCUMENTS + b * slots * _DOCUMENT
    begin = 0  # of the last document that has begun
    documents = 0
    q_tiles = 0
    returns = 0
    for first in range(0, length, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        inside = tokens < length
        places = numbers + tokens.to(tl.int64) * numbers_i
        own = tl.load(places, mask=inside, other=-1)
        left = tl.load(places - numbers_i, mask=inside & (tokens > 0), other=-1)
        right = tl.load(places + numbers_i, mask=tokens + 1 < length, other=-1)
        begins = inside & ((tokens == 0) | (own != left))
        ends = inside & ((tokens + 1 == length) | (own != right))
        returns += tl.sum((begins & (own != tokens)).to(tl.int32), 0)
        begun = tl.associative_scan(tl.where(begins, tokens, begin), 0, _largest)
        size = tokens - begun + 1
        own_tiles = tl.where(ends, tl.cdiv(size, ROW_BLOCK * CONSUMERS), 0)
        before = q_tiles + tl.cumsum(own_tiles, 0) - own_tiles
        number = documents + tl.cumsum(ends.to(tl.int32), 0) - 1
        written = ends & (number < slots)
        tl.store(found + number * _DOCUMENT, begun, mask=written)
        tl.store(found + number * _DOCUMENT + 1, size, mask=written)
        tl.store(found + number * _DOCUMENT + 2, before, mask=written)
        begin = tl.max(begun, 0)
        documents += tl.sum(ends.to(tl.int32), 0)
        q_tiles += tl.sum(own_tiles, 0)
    listed = (returns == 0) & (q_tiles <= slots)
    tl.store(COUNTS + b * 2, tl.where(listed, q_tiles, 0))
    tl.store(COUNTS + b * 2 + 1, tl.where(listed, documents, 0))


@triton.jit(do_not_specialize=["number", "lo", "hi"])
def measure_documents_of_mask(
    DOCUMENTS, COUNTS, ENTRIES, STEPS, ELEMENTS, number, lo, hi,
    KV_RANGE: tl.constexpr, CONSUMERS: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the entry of each slot's q tile, and the number of kv tiles that the q tile visits, 0 if there is none.

    One program per (BLOCK slots, batch element).  DOCUMENTS, COUNTS: as `find_documents` writes them; number: slots of
    a batch element; ELEMENTS: int32 [1 + batch], the number of batch elements without documents, then their indices;
    the other arguments are those of `measure_documents`.
    """
    b = tl.program_id(1)
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(COUNTS + b * 2)
    documents = tl.load(COUNTS + b * 2 + 1)
    exists = slots < count
    found = DOCUMENTS + b.to(tl.int64) * number * _DOCUMENT
    document = tl.zeros_like(slots) - 1
    for first in range(0, documents, BLOCK):
        others = first + tl.arange(0, BLOCK)
        before = tl.load(found + others * _DOCUMENT + 2, mask=others < documents, other=number)
        document += tl.sum((before[None, :] <= slots[:, None]).to(tl.int32), 1)
    begin = tl.load(found + document * _DOCUMENT, mask=exists, other=0)
    length = tl.load(found + document * _DOCUMENT + 1, mask=exists, other=1)
    q_tile = slots - tl.load(found + document * _DOCUMENT + 2, mask=exists, other=0)
    first_block = tl.cdiv(length, ROW_BLOCK) - (q_tile + 1) * CONSUMERS
    band = length, length, tl.zeros_like(length) + lo, hi
    kv, _, _, _ = KV_RANGE(tl.maximum(first_block, 0), band, ROW_BLOCK, BLOCK_KV)
    _, _, _, end = KV_RANGE(first_block + CONSUMERS - 1, band, ROW_BLOCK, BLOCK_KV)
    end = tl.maximum(end, 1)
    place = b.to(tl.int64) * number + slots
    tl.store(STEPS + place, tl.where(exists, end - tl.minimum(kv, end - 1), 0), mask=slots < number)
    tl.store(ENTRIES + place * WORDS, first_block, mask=exists)
    tl.store(ENTRIES + place * WORDS + 1, begin, mask=exists)
    tl.store(ENTRIES + place * WORDS + 2, begin, mask=exists)
    tl.store(ENTRIES + place * WORDS + 3, length, mask=exists)
    tl.store(ENTRIES + place * WORDS + 4, b, mask=exists)
    if (tl.program_id(0) == 0) & (b == 0):
        batch = tl.num_programs(1)
        left = 0
        for first in range(0, batch, BLOCK):
            elements = first + tl.arange(0, BLOCK)
            unlisted = (tl.load(COUNTS + elements * 2, mask=elements < batch, other=1) == 0).to(tl.int32)
            tl.store(ELEMENTS + left + tl.cumsum(unlisted, 0), elements, mask=unlisted > 0)
            left += tl.sum(unlisted, 0)
        tl.store(ELEMENTS, left)


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
        for i in tl.static_range(WORDS):
            tl.store(LIST + i, count if i == 0 else 0)
