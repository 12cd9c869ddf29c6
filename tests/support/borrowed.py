"""FlashAttention-2's forward as its interface behaves, on the CPU: what its window arguments and layouts mean."""

from __future__ import annotations

from typing import Any

import torch
from dash_inductor.kernels import borrowed
from torch import Tensor

from dash_inductor.model import Band


def window_sees(i: int, j: int, q_len: int, kv_len: int, left: int, right: int) -> bool:
    """Whether query i sees key j for window arguments as `mha_varlen_fwd` normalises them."""
    left, right = (-1 if x >= kv_len else x for x in (left, right))
    if left >= 0 and right < 0:
        right = kv_len
    if left < 0 and right >= 0:
        left = kv_len
    at = i + kv_len - q_len
    return (left < 0 or at - left <= j) and (right < 0 or j <= at + right)


class Library:
    """Stands for `torch.ops.aten` in `kernels.borrowed`; keeps the arguments of the last call."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
        dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out, log-sum-exp [heads, tokens]) of packed [tokens, heads, dim]; a row without keys gives 0 and inf."""
        assert dropout_p == 0.0
        assert not is_causal
        assert not return_debug_mask
        assert starts_q.dtype == starts_k.dtype == torch.int32
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        group = query.shape[1] // key.shape[1]
        # With one row per sequence the library packs the heads of a group and may split the kv range.
        assert max_q > 1 or group == 1 or window_size_left >= 0
        self.arguments = {"max_q": max_q, "max_k": max_k, "left": window_size_left, "right": window_size_right}
        out = torch.full_like(query, float("nan"))
        lse = torch.full((query.shape[1], query.shape[0]), float("nan"))
        for b in range(starts_q.numel() - 1):
            rows, keys = (slice(int(s[b]), int(s[b + 1])) for s in (starts_q, starts_k))
            q_len, kv_len = rows.stop - rows.start, keys.stop - keys.start
            assert q_len <= max_q
            assert kv_len <= max_k
            keep = torch.tensor(
                [
                    [window_sees(i, j, q_len, kv_len, window_size_left, window_size_right) for j in range(kv_len)]
                    for i in range(q_len)
                ]
            )
            q, k, v = query[rows].float(), *(t[keys].float().repeat_interleave(group, 1) for t in (key, value))
            s = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~keep, float("-inf"))
            p = torch.softmax(s, -1).nan_to_num(0.0)
            out[rows] = torch.einsum("hij,jhd->ihd", p, v).to(out.dtype)
            sums = torch.logsumexp(s, -1)
            lse[:, rows] = torch.where(sums == float("-inf"), float("inf"), sums)
        return out, lse


def flash_sees(band: Band, q_len: int, kv_len: int) -> set[tuple[int, int]]:
    """The pairs (query, key) that count if `kernels.borrowed` hands this mask (anchored top left) to the library."""
    library = Library()
    rows = torch.zeros(1, 1, q_len, 8), torch.zeros(1, 1, kv_len, 8)
    before = borrowed.aten
    borrowed.aten = library
    try:
        borrowed._flash(rows[0], rows[1], rows[1], band, 1.0)
    finally:
        borrowed.aten = before
    left, right = library.arguments["left"], library.arguments["right"]
    return {(i, j) for i in range(q_len) for j in range(kv_len) if window_sees(i, j, q_len, kv_len, left, right)}
