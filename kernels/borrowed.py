"""The forwards that PyTorch has and whose log-sum-exp the backward reads: one function per name in `Plan.forward`.

All are deterministic where they are planned (one writer per output element, no split sums); `planning.forwards` knows
where that is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..model.call import Call
from ..model.mask import Band

aten = torch.ops.aten


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, name: str) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp): out [batch, q heads, q_len, head dim]; lse fp32 [batch, q heads, q_len], natural, contiguous.

    Rows that see no key give zeros; their log-sum-exp is infinite.

    Raises:
        ArgumentError: an unknown name, or a mask that this forward cannot compute.
    """
    if name not in _FORWARDS:
        raise ArgumentError("plan.forward", name, list(_FORWARDS))
    if call.mask.keys is not None:
        raise ArgumentError("mask", str(call.mask), f"for the {name} forward: a band alone")
    band = call.mask.band.resolve(query.shape[2], key.shape[2])
    out, logsumexp = _FORWARDS[name](query, key, value, band, call.scale)
    return out, logsumexp.contiguous()


def _cudnn(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    causal = _is_causal("cudnn", band)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def _flash(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 through its entry for packed sequences, which never splits the kv range.

    Its other entry splits the kv range of small problems by batch size and number of SMs, so that a batch element would
    have other bits in another batch.  Query i sees keys from ``i + offset - left`` to ``i + offset + right``; -1 is
    unbounded on both sides, beside a bound it counts as kv_len, and so does whatever is larger than kv_len.
    """
    batch, q_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    offset = kv_len - q_len
    left, right = (-1 if band.hi is None else band.hi + offset), (-1 if band.lo is None else -band.lo - offset)
    if (band.hi is not None and left < 0) or (band.lo is not None and right < 0):
        raise ArgumentError("mask", str(band), "for the flash forward: a band that contains the bottom-right diagonal")
    if not band.is_full and kv_len < q_len - 1 and (right < 0 or kv_len <= right < q_len - 1):
        raise ArgumentError("mask", str(band), f"for the flash forward with {q_len} queries and {kv_len} keys: causal")
    # Query heads of a group would be packed together, and the kv range split, for a longest query of one row.
    longest = max(q_len, 2)
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=query.device) * n for n in (q_len, kv_len)]
    out, lse, *_ = aten._flash_attention_forward(
        *map(_packed, (query, key, value)), *starts, longest, kv_len, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.unflatten(0, (batch, q_len)).transpose(1, 2), lse.view(q_heads, batch, q_len).transpose(0, 1)


def _packed(x: Tensor) -> Tensor:
    """[batch * length, heads, head dim] of [batch, heads, length, head dim], with unit stride in the last dimension."""
    packed = x.transpose(1, 2).flatten(0, 1)
    return packed if packed.stride(-1) == 1 else packed.contiguous()


def _efficient(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """CUTLASS memory-efficient attention; no grouped heads, and windows only on the bottom-right diagonal."""
    offset = key.shape[2] - query.shape[2]
    window = None if band.hi is None else band.hi + offset + 1
    if band.is_full:
        mask_type = 0
    elif band.lo == 0 and band.hi is None:
        mask_type = 1
    elif band.lo == -offset and offset >= 0 and (window is None or window > 0):
        mask_type = 2
    else:
        raise ArgumentError("mask", str(band), "for the efficient forward: full, causal or a causal window")
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    out, lse, *_ = aten._efficient_attention_forward(
        *(x.transpose(1, 2) for x in (query, key, value)), None, None, None, None, None, 0.0, mask_type, True,
        scale=scale, window_size=window,
    )  # fmt: skip
    return out.transpose(1, 2), lse[..., : query.shape[2]]


def _cpu(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    causal = _is_causal("cpu", band)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _is_causal(forward: str, band: Band) -> bool:
    if band.is_full:
        return False
    if (band.lo, band.hi) != (0, None):
        raise ArgumentError("mask", str(band), f"for the {forward} forward: full or causal (top left)")
    return True


_FORWARDS: dict[str, Callable[[Tensor, Tensor, Tensor, Band, float], tuple[Tensor, Tensor]]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
    "cpu": _cpu,
}
