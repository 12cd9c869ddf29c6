"""The outcome of a site: `Decision`, which is a `Plan` or the reason why the site is kept."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from ..errors import ArgumentError
from .reasons import Reason


@dataclass(frozen=True)
class Tiles:
    """Tile shape (tokens) and launch options of one kernel; ``str`` gives e.g. ``64x128w8s3``."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_kv}w{self.num_warps}s{self.num_stages}"

    @staticmethod
    def parse(text: str) -> Tiles:
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
        if not match:
            raise ArgumentError("tiles", text, "'<block_q>x<block_kv>w<num_warps>s<num_stages>'")
        return Tiles(*map(int, match.groups()))


@dataclass(frozen=True)
class Plan:
    """The kernels of a site.  ``str(plan)`` is an argument of the graph's op, so dumps show it; `parse` reads it back.

    Args:
        kernel: the name of a kernel family: "hopper" (warp-specialised Gluon), "portable" (Triton templates) or
            "reference" (plain ATen).
        schedule: name of a schedule; "two_pass" runs a dq kernel and a dk/dv kernel without a shared accumulator.
        forward: the forward that makes the log-sum-exp: the name of a kernel family, or "keep", which leaves the
            graph's own.
        dkdv: tiles of the kernel that owns dk and dv (and, in one pass, accumulates dq).
        dq: tiles of the dq kernel; two_pass only.
        section: heads that are launched together (changes speed, never bits).
        tf32: fp32 matmuls may use tf32.
        forward_tiles: tiles of the forward; None exactly where `forward` is "keep".
        critical_path: predicted time in the schedule's DAG model (units: one tile's compute); not part of ``str``.
        numerics_key: changes whenever the bits of the gradients could; not part of ``str``.
        schedule_note: why the plan does not have the schedule that was asked for, "" where it has; not part of ``str``.
    """

    kernel: str
    schedule: str
    forward: str
    dkdv: Tiles
    dq: Tiles | None = None
    section: int = 1
    tf32: bool = False
    forward_tiles: Tiles | None = None
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
        text = (
            f"{self.kernel}/{self.schedule}/dkdv={self.dkdv}{dq}/section={self.section}/forward={self.forward}{tiles}"
        )
        return text + ("/tf32" if self.tf32 else "")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Plan:
        """Inverse of ``str`` (prediction and numerics key are left empty)."""
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
            plan = replace(plan, section=int(fields.pop("section")), tf32=flags[1:] == ["tf32"])
        except (IndexError, KeyError, ValueError) as e:
            raise ArgumentError("plan", text, "a string made by str(Plan)") from e
        if fields or flags[1:] not in ([], ["tf32"]):
            raise ArgumentError("plan", text, "a string made by str(Plan)")
        return plan


@dataclass(frozen=True)
class Kept:
    """A site stays as PyTorch had it.

    Args:
        reason: why.
        detail: more about the reason; may be empty.
    """

    reason: Reason
    detail: str = ""


Decision = Plan | Kept
"""The outcome of a site."""
