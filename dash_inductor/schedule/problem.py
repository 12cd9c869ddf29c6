"""The vocabulary between the parts: `Band` (a mask), `Site` (what was found), `Plan` (what will run).

Pure data, standard library only: matching writes a `Site`, the planner turns it into a `Plan`, lowering reads that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import ArgumentError

MAX_LENGTH = 2**30 - 1
"""Longest sequence, and farthest bound of a band: the kernels compute with positions in int32."""

Anchor = Literal["top_left", "bottom_right"]
DType = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True)
class Band:
    """A mask in normal form: query i sees key j iff ``lo <= i + offset - j <= hi``.

    Args:
        lo, hi: bounds in tokens; None means unbounded.
        anchor: offset is 0 for "top_left", ``kv_len - q_len`` for "bottom_right" (only there do lengths matter).
    """

    lo: int | None = None
    hi: int | None = None
    anchor: Anchor = "top_left"

    def __post_init__(self) -> None:
        if self.anchor not in ("top_left", "bottom_right"):
            raise ArgumentError("anchor", self.anchor, ("top_left", "bottom_right"))
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise ArgumentError("hi", self.hi, f"None or an integer >= lo={self.lo}")
        if self.is_full and self.anchor != "top_left":
            object.__setattr__(self, "anchor", "top_left")  # one spelling of the full mask

    @property
    def is_full(self) -> bool:
        return self.lo is None and self.hi is None

    def resolve(self, q_len: int, kv_len: int) -> Band:
        """The same mask anchored top left, for known lengths; bounds that exclude nothing become None."""
        offset = kv_len - q_len if self.anchor == "bottom_right" else 0
        lo = None if self.lo is None else self.lo - offset
        hi = None if self.hi is None else self.hi - offset
        if lo is not None and lo <= -(kv_len - 1):
            lo = None
        if hi is not None and hi >= q_len - 1:
            hi = None
        return Band(lo, hi)

    def visible(self, i: int, j: int, q_len: int, kv_len: int) -> bool:
        """Whether query i (0-based) sees key j."""
        d = i - j + (kv_len - q_len if self.anchor == "bottom_right" else 0)
        return (self.lo is None or d >= self.lo) and (self.hi is None or d <= self.hi)

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if (self.lo, self.hi) == (0, None):
            text = "causal"
        else:
            text = "band({},{})".format(*("none" if x is None else x for x in (self.lo, self.hi)))
        return text if self.anchor == "top_left" else f"{text}:{self.anchor}"

    @staticmethod
    def parse(text: str) -> Band:
        """Inverse of ``str``."""
        body, _, anchor = text.partition(":")
        match = re.fullmatch(r"band\((none|-?\d+),(none|-?\d+)\)", body)
        if body == "full":
            lo, hi = None, None
        elif body == "causal":
            lo, hi = 0, None
        elif match:
            lo, hi = (None if x == "none" else int(x) for x in match.groups())
        else:
            raise ArgumentError("mask", text, "'full', 'causal' or 'band(lo,hi)', optionally with ':bottom_right'")
        return Band(lo, hi, anchor or "top_left")  # type: ignore[arg-type]  # __post_init__ checks it


@dataclass(frozen=True)
class Site:
    """Facts of one attention backward, as the planner needs them.

    Lengths and batch are None when they are dynamic; `head_dim` is the dimension of q and k, `value_dim` that of v.
    Of dynamic lengths may be known: `square`, that q_len equals kv_len; `q_within_kv`, that it is at most kv_len;
    `least_q_len`, a lower bound of q_len.  For static lengths all three follow from the lengths.
    """

    device: Literal["cuda", "cpu"]
    dtype: DType
    batch: int | None
    q_heads: int
    kv_heads: int
    q_len: int | None
    kv_len: int | None
    head_dim: int
    value_dim: int
    mask: Band
    scale: float
    allow_tf32: bool = False
    square: bool = False
    q_within_kv: bool = False
    least_q_len: int = 1

    def __post_init__(self) -> None:
        if self.q_len is not None:
            object.__setattr__(self, "least_q_len", self.q_len)
        if self.q_len is not None and self.kv_len is not None:
            object.__setattr__(self, "square", self.q_len == self.kv_len)
            object.__setattr__(self, "q_within_kv", self.q_len <= self.kv_len)
        elif self.square:
            object.__setattr__(self, "q_within_kv", True)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads


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
    """What runs at a site.  ``str(plan)`` is an argument of the graph's op, so dumps show it; `parse` reads it back.

    Args:
        kernel: "hopper" (warp-specialised Gluon), "portable" (Triton template) or "reference" (plain ATen).
        schedule: name of a schedule; "two_pass" runs a dq kernel and a dk/dv kernel without a shared accumulator.
        forward: which forward produces the log-sum-exp; "keep" leaves the graph's own forward.
        dkdv: tiles of the kernel that owns dk and dv (and, in one pass, accumulates dq).
        dq: tiles of the dq kernel; two_pass only.
        section: heads that are launched together (changes speed, never bits).
        tf32: fp32 matmuls may use tf32.
        critical_path: predicted time in the schedule's DAG model (units: one tile's compute); not part of ``str``.
        numerics_key: changes whenever the bits of the gradients could; not part of ``str``.
        forward_note: where `forward` is "keep", why; not part of ``str``.
    """

    kernel: str
    schedule: str
    forward: str
    dkdv: Tiles
    dq: Tiles | None = None
    section: int = 1
    tf32: bool = False
    critical_path: float = 0.0
    numerics_key: str = ""
    forward_note: str = ""

    def __str__(self) -> str:
        dq = f"/dq={self.dq}" if self.dq else ""
        return f"{self.kernel}/{self.schedule}/dkdv={self.dkdv}{dq}/section={self.section}/forward={self.forward}" + (
            "/tf32" if self.tf32 else ""
        )

    @staticmethod
    def parse(text: str) -> Plan:
        """Inverse of ``str`` (prediction and numerics key are left empty)."""
        head, *rest = text.split("/")
        try:
            fields = dict(part.split("=", 1) for part in rest if "=" in part)
            flags = [part for part in rest if "=" not in part]
            plan = Plan(head, flags[0], fields.pop("forward"), Tiles.parse(fields.pop("dkdv")))
            if "dq" in fields:
                plan = replace(plan, dq=Tiles.parse(fields.pop("dq")))
            plan = replace(plan, section=int(fields.pop("section")), tf32=flags[1:] == ["tf32"])
        except (IndexError, KeyError, ValueError) as e:
            raise ArgumentError("plan", text, "a string made by str(Plan)") from e
        if fields or flags[1:] not in ([], ["tf32"]):
            raise ArgumentError("plan", text, "a string made by str(Plan)")
        return plan
