"""Tables of the Hopper forward for masks that are data, from booleans, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from dash_inductor.kernels.hopper.forward.data import ForwardData
from dash_inductor.schedule.table_tile_schedule import FORWARD_UNSEEN, seen_words

ROWS = 64


def tables(keep: Tensor, from_the_end: bool, consumers: int, block_kv: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """(counts, steps) for booleans [tables, q_len, kv_len] that say who sees whom.

    from_the_end: whether the last row blocks belong to the first tile.
    """
    n, q_len, kv_len = keep.shape
    blocks, kv_tiles = -(-q_len // rows), -(-kv_len // block_kv)

    def padded(value_of_row: bool) -> Tensor:
        """[table, row block, kv tile, pair]; keys past the end are False."""
        whole = torch.zeros(n, blocks * rows, kv_tiles * block_kv, dtype=torch.bool, device=keep.device)
        whole[:, :q_len, :kv_len] = keep
        whole[:, q_len:, :] = value_of_row
        return whole.view(n, blocks, rows, kv_tiles, block_kv).transpose(2, 3).flatten(3)

    use_of_block = padded(False).any(-1).int() + padded(True).all(-1).int()  # 0 skip, 1 partial, 2 full
    q_tiles = -(-blocks // consumers)
    place = torch.arange(q_tiles)
    first = blocks - (place + 1) * consumers if from_the_end else place * consumers
    use = torch.zeros(n, q_tiles, consumers, kv_tiles, dtype=torch.int32, device=keep.device)
    for q_tile, block in enumerate(first.tolist()):
        for consumer in range(consumers):
            if 0 <= block + consumer < blocks:
                use[:, q_tile, consumer] = use_of_block[:, block + consumer]
    kv = torch.arange(kv_tiles, dtype=torch.int32, device=keep.device)
    last = torch.where((use > 0).any(2), kv, 0).amax(-1)  # of every tile
    idle = (use == 0).all(-1)  # consumers with nothing to do
    use += (idle[..., None] & (kv == last[:, :, None, None])).int()
    words = kv.expand(n, q_tiles, kv_tiles).clone()
    for consumer in range(consumers):
        words |= use[:, :, consumer] << (16 + 2 * consumer)
    everywhere = torch.nn.functional.pad(keep.any(1), (0, -kv_len % block_kv), value=True)
    unseen = ~everywhere.view(n, 1, kv_tiles, block_kv).all(-1)
    words |= unseen.int() << FORWARD_UNSEEN
    listed = (use > 0).any(2)
    order = torch.where(listed, kv, -1).argsort(-1, descending=True)
    steps = torch.where(listed, words, 0).gather(-1, order)
    return listed.sum(-1, dtype=torch.int32).contiguous(), steps.int().contiguous()


def seen_bits(keep: Tensor, block_kv: int, rows: int = ROWS) -> Tensor:
    """The bits of booleans [tables, q_len, kv_len], each put to its place by Note [Seen bits]."""
    tables, q_len, kv_len = keep.shape
    blocks, kv_tiles, words = -(-q_len // rows), -(-kv_len // block_kv), seen_words(block_kv)
    table, q, k = keep.nonzero().unbind(1)
    row, key = q % rows, k % block_kv
    thread = row // 16 * 32 + row % 8 * 4 + key // 2 % 4
    bit = key // 8 % 8 * 4 + row // 8 % 2 * 2 + key % 2
    place = ((table * blocks + q // rows) * kv_tiles + k // block_kv) * 2 * rows + thread
    found = torch.zeros(tables * blocks * kv_tiles * 2 * rows * words, dtype=torch.int64, device=keep.device)
    found.index_add_(0, place * words + key // 64, torch.ones_like(bit) << bit)
    return found.to(torch.int32).view(tables, blocks, kv_tiles, 2 * rows, words)


def segment_ids(q_segments: Tensor, kv_segments: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """(q_segment_ids, kv_segment_ids) of segments, numbers >= 0, and the validity of keys; [batch, length] each."""
    return q_segments.int().contiguous(), torch.where(valid, kv_segments.int(), -1).contiguous()


def seen(q_segment_ids: Tensor, kv_segment_ids: Tensor, band: Tensor) -> Tensor:
    """Booleans [batch, q_len, kv_len]: who sees whom by segment ids and a band of booleans [q_len, kv_len]."""
    return (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]) & band


def of_segment_ids(
    q_segment_ids: Tensor,
    kv_segment_ids: Tensor,
    band: Tensor,
    has_lo: bool,
    consumers: int,
    block_kv: int,
    rows: int = ROWS,
) -> ForwardData:
    """The data of a mask of segment ids and a band of booleans [q_len, kv_len]."""
    keep = seen(q_segment_ids, kv_segment_ids, band)
    found = tables(keep, has_lo, consumers, block_kv, rows)
    return ForwardData(q_segment_ids[:, None], kv_segment_ids[:, None], keep.any(1, keepdim=True), *found)


def of_dense(
    dense: Tensor, sizes: tuple[int, int, int, int], band: Tensor, consumers: int, block_kv: int,
    segment_ids: tuple[Tensor, Tensor] | None = None, rows: int = ROWS,
) -> ForwardData:  # fmt: skip
    """The data of a dense mask that broadcasts to `sizes`, a band, and segment ids where there are any: all in its
    bits.
    """
    batch, _, q_len, kv_len = sizes
    keep = dense.expand(batch, -1, q_len, kv_len) & band
    if segment_ids is not None:
        keep = keep & seen(*segment_ids, band)[:, None]
    keys_seen = keep.any(2)
    keep = keep.flatten(0, 1)
    found = tables(keep, True, consumers, block_kv, rows)
    return ForwardData(None, None, keys_seen, *found, seen_bits(keep, block_kv, rows))
