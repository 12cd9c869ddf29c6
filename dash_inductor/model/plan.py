"""The decision about an attention: `Decision`, either a `Plan` or the reason why the attention is not replaced."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from ..errors import ArgumentError
from .reasons import Reason


@dataclass(frozen=True)
class Tiles:
    """Tile shape (in tokens) and launch options of one kernel; ``str`` gives for example ``64x128w8s3``."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}w{self.num_warps}s{self.num_stages}"

    @staticmethod
    def parse(text: str) -> Tiles:
        """Parse the result of ``str(tiles)``.

        Raises:
            ArgumentError: the text was not made by ``str(Tiles)``.
        """
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
        if not match:
            raise ArgumentError("tiles", text, "'<block_q>x<block_kv>w<num_warps>s<num_stages>'")
        return Tiles(*map(int, match.groups()))


_NO_SPLIT_KV = "no_split_kv"
"""The word for `split_kv=False` in the text of a plan."""


@dataclass(frozen=True)
class Plan:
    """The kernels chosen for an attention.

    ``str(plan)`` is an argument of the operator in the graph; `parse` is its inverse.

    Args:
        kernel: the kernel family: "hopper" (warp-specialized Gluon), "portable" (Triton templates) or "reference"
            (plain ATen).
        schedule: the name of a schedule; "two_pass" runs a dq kernel and a dk/dv kernel without a shared accumulator.
        forward: the kernel family of the forward, which computes the log-sum-exp, or "keep", which keeps the graph's
            forward.
        dkdv: the tiles of the dk/dv kernel, which in one-pass schedules also accumulates dq.
        dq: the tiles of the dq kernel; only for "two_pass".
        head_chunk: how many heads are launched together; it changes speed, never bits.
        tf32: whether fp32 matmuls may use tf32.
        forward_tiles: the tiles of the forward; None if and only if `forward` is "keep".
        split_kv: whether the forward may split the keys of few queries (split-KV).
        critical_path: predicted time in the schedule's DAG model, in units of the compute time of one tile; not part of
            ``str``.
        numerics_key: changes whenever the bits of the gradients may change; not part of ``str``.
        schedule_note: why the plan does not use the schedule that was requested, "" if it does; not part of ``str``.
    """

    kernel: str
    schedule: str
    forward: str
    dkdv: Tiles
    dq: Tiles | None = None
    head_chunk: int = 1
    tf32: bool = False
    forward_tiles: Tiles | None = None
    split_kv: bool = True
    critical_path: float = 0.0
    numerics_key: str = ""
    schedule_note: str = ""

    def __hash__(self) -> int:  # launches look calls and plans up in caches
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        dq = f"/dq={self.dq}" if self.dq else ""
        tiles = f"/fwd={self.forward_tiles}" if self.forward_tiles else ""
        text = f"{self.kernel}/{self.schedule}/dkdv={self.dkdv}{dq}/head_chunk={self.head_chunk}"
        flags = [*(["tf32"] if self.tf32 else []), *([] if self.split_kv else [_NO_SPLIT_KV])]
        return "/".join([f"{text}/forward={self.forward}{tiles}", *flags])

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Plan:
        """Parse the result of ``str(plan)``; the fields that are not part of ``str`` get their defaults.

        Raises:
            ArgumentError: the text was not made by ``str(Plan)``.
        """
        if not isinstance(text, str):
            raise ArgumentError("plan", text, "a string made by str(Plan)")
        head, *rest = text.split("/")
        try:
            fields = dict(part.split("=", 1) for part in rest if "=" in part)
            flags = [part for part in rest if "=" not in part]
            plan = Plan(head, flags[0], fields.pop("forward"), Tiles.parse(fields.pop("dkdv")))
            if "dq" in fields:
                plan = replace(plan, dq=Tiles.parse(fields.pop("dq")))
            if "fwd" in fields:
                plan = replace(plan, forward_tiles=Tiles.parse(fields.pop("fwd")))
            plan = replace(plan, head_chunk=int(fields.pop("head_chunk")))
            plan = replace(plan, tf32="tf32" in flags[1:], split_kv=_NO_SPLIT_KV not in flags[1:])
        except (IndexError, KeyError, ValueError) as e:
            raise ArgumentError("plan", text, "a string made by str(Plan)") from e
        if fields or flags[1:] not in ([], ["tf32"], [_NO_SPLIT_KV], ["tf32", _NO_SPLIT_KV]):
            raise ArgumentError("plan", text, "a string made by str(Plan)")
        return plan


@dataclass(frozen=True)
class Fallback:
    """The decision that PyTorch's own implementation of an attention runs.

    Args:
        reason: the reason.
        detail: details of the reason; may be empty.
    """

    reason: Reason
    detail: str = ""


Decision = Plan | Fallback
"""The decision about one attention."""
