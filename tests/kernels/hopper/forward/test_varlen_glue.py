"""Producer and consumers of the Hopper forward under masks of rows, run as plain Python on numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common.score import LOG2E
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.model import Band
from dash_inductor.schedule import Problem
from dash_inductor.schedule.document_tiles import EVERYWHERE, WORDS, q_tiles

from ....support.calls import traits_of
from ....support.hopper_forward import rounding_of
from ....support.hopper_forward_glue import (
    Descriptor,
    Fault,
    ForwardSimulation,
    Input,
    Output,
    Pointer,
    arguments_of,
    constants_of,
)
from ....support.varlen_layout import LENGTHS, Rows

ROWS, BLOCK_KV, SCALE = 8, 16, 0.3
CAUSAL = Band(0)
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Launch:
    """A launch of the main kernel in small: row blocks of ROWS rows, kv tiles and documents begin at BLOCK_KV rows.

    Args:
        lengths, behind: as of `Rows`.
        columns: a key of `build.FORWARD_CONFIGS`; what is behind that is as of `hopper_forward_glue`.
    """

    lengths: tuple[int, ...]
    band: Band = CAUSAL
    columns: tuple[int, int] = (64, 64)
    behind: int = 0
    dims: tuple[int, int] = (16, 8)
    group: int = 1
    kv_heads: int = 1
    ctas: int = 3

    def __str__(self) -> str:
        heads = f"{self.kv_heads} groups of {self.group} on {self.ctas}"
        return f"{self.lengths} {self.behind} {self.columns} {self.band} {heads}"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def rows(self) -> Rows:
        return Rows(self.lengths, self.behind, ROWS, BLOCK_KV)

    def tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.heads, 0), (self.kv_heads, 0), (self.kv_heads, 1))
        q, k, v = (
            torch.randn(1, heads, self.rows.tokens, self.dims[i], generator=generator).bfloat16() for heads, i in shapes
        )
        return q, k, v

    @property
    def problem(self) -> build.Specialisation:
        traits = traits_of(self.band, segment_ids=True, varlen=True)
        return build.Specialisation("bfloat16", *self.columns, traits, True)

    def run(self, tensors: Tensors | None = None, **how: Any) -> Ran:
        q, k, v = tensors or self.tensors()
        length = self.rows.rows
        tables = Problem(self.band, length, length, ROWS, BLOCK_KV, 1, self.heads)
        lo, hi = EVERYWHERE if self.band.lo is None else self.band.lo, self.band.hi or 0
        problem = self.problem
        listed = q_tiles(self.rows.entries(), tables, problem.config.consumers)
        unused = [(9999,) * WORDS] * (length // BLOCK_KV - len(listed))
        work_list = torch.tensor([(len(listed), *[0] * (WORDS - 1)), *listed, *unused], dtype=torch.int32)
        out = Output(torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype))
        lse = Output(torch.empty(1, self.heads, length))
        head_chunk = how.pop("head_chunk", min(2 * self.group, self.heads))
        sizes = {
            "batch_heads": self.heads, "q_heads": self.heads, "group": self.group, "q_len": length, "kv_len": length,
            "lo": lo, "hi": hi, "head_chunk": head_chunk, "last_head_chunk": self.heads // head_chunk * head_chunk,
            "scale_log2": SCALE * LOG2E,
        }  # fmt: skip
        arguments = arguments_of(
            q_desc=Descriptor(q), k_desc=Descriptor(k), v_desc=Descriptor(v), out_desc=out, lse_ptr=Pointer(lse),
            counter_ptr=None, problem=sizes, documents={"q_tiles_ptr": Pointer(Input(work_list))},
            target=(Pointer(out), *out.tensor.stride()[:3], v.shape[3]),
        )  # fmt: skip
        constants = constants_of(problem, BLOCK_KV=BLOCK_KV)
        simulation = ForwardSimulation(constants, arguments, self.ctas, rows=ROWS, **how)
        simulation.run()
        return Ran(self, out, lse, (q, k, v))


@dataclass
class Ran:
    launch: Launch
    out: Output
    lse: Output
    tensors: Tensors

    def check(self) -> None:
        """Everything is written once, every token at its place, and numbers are attention's."""
        assert (self.out.writes == 1).all()
        rows = self.launch.rows
        exists = torch.tensor([token is not None for token in rows.tokens_of_rows()])
        assert (self.lse.writes == exists).all()  # `prepare` writes the others
        q, k, v = (rows.filled(t.double()) for t in self.tensors)
        k, v = (t.repeat_interleave(self.launch.group, 1) for t in (k, v))
        keep = rows.keep(self.launch.band)
        s = (q @ k.mT * SCALE).masked_fill(~keep, -torch.inf)
        lse = s.logsumexp(-1)
        p = torch.where(keep, (s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp(), 0.0)
        torch.testing.assert_close(
            self.lse.tensor.double()[..., exists],
            lse[..., exists],
            rtol=1e-5,
            atol=1e-5 + rounding_of(self.launch.problem),
        )
        torch.testing.assert_close(self.out.tensor.double(), rows.emptied(p @ v), rtol=1e-2, atol=1e-2)

    def of_document(self, d: int) -> Tensor:
        start = self.launch.rows.starts[d]
        return self.out.tensor[:, :, start : start + self.launch.lengths[d]]


BANDS = [Band(0), Band(), Band(0, 20), Band(-7, 12)]
_columns = itertools.cycle(build.FORWARD_CONFIGS)
_heads = itertools.cycle([(1, 1, 1), (2, 1, 3), (1, 3, 2), (4, 1, 5)])
LAUNCHES = [
    Launch(lengths, band, next(_columns), behind, group=heads[0], kv_heads=heads[1], ctas=heads[2])
    for (lengths, behind), band in itertools.product(zip(LENGTHS, (0, 9, 0, 20, 0), strict=True), BANDS)
    for heads in (next(_heads),)
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_roles_compute_attention(launch: Launch) -> None:
    """Copies that arrive late and all CTAs at once; copies at any time and one CTA after the other."""
    launch.run(late=True).check()
    launch.run(seed=1, resident=1).check()
    launch.run(seed=2).check()


def test_no_tokens() -> None:
    """Empty documents alone: nothing is written, and nothing read that is not there."""
    Launch((0, 0)).run().check()


COMPANY = list(itertools.product(BANDS, build.FORWARD_CONFIGS))
SOON = [(band, columns) for number, (band, columns) in enumerate(COMPANY) if number % 5 == 0]
"""Every band and every setting once."""


@pytest.mark.parametrize(
    ("band", "columns"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[] if case in SOON else pytest.mark.full)
        for case in COMPANY
    ],
)
def test_a_document_has_the_same_bits_in_any_company(band: Band, columns: tuple[int, int]) -> None:
    """Alone, first, last and between others of other lengths, whose values change and are NaN."""
    for length in (1, 7, 8, 9, 15, 16, 17, 40):
        own = Launch((length,), band, columns, group=2)
        tensors = own.tensors()
        alone = own.run(tensors)
        alone.check()
        for before, after in (((), (5, 30)), ((11,), ()), ((16, 3), (1, 20)), ((0, 1, 2), (0, 16))):
            launch = replace(own, lengths=(*before, length, *after))
            part = slice(sum(before), sum(before) + length)
            for factor in (9.0, torch.nan):
                others = launch.tensors()
                for whole, t in zip(others, tensors, strict=True):
                    whole *= factor
                    whole[:, :, part] = t
                found = launch.run(others).of_document(len(before))
                assert torch.equal(found, alone.of_document(0)), (length, before, factor)


WRONG = ""
LAST = Launch((20, 9, 30), group=2, ctas=2)
CONTROLS = {
    "queries of rows": (LAST, WRONG, "first_row = token", "first_row = row_of_document"),
    "keys of rows": (LAST, WRONG, "first_key = token if", "first_key = row_of_document if"),
    "values of rows": (LAST, WRONG, "load_rows(desc, b, head, token + kv", "load_rows(desc, b, head, kv"),
    "keys of the next document": (replace(LAST, band=Band()), WRONG, "kv_len=tokens", "kv_len=tokens + 2"),
    "queries of the next document": (LAST, WRONG, "q_len=tokens,", "q_len=tokens + 2,"),
    "another document": (LAST, WRONG, "WORDS * (1 + q_tile)", "WORDS * q_tile"),
    "results of rows": (LAST, WRONG, "token + row, q_len - row", "row, q_len - row"),
    "sums of tokens": (LAST, WRONG, "work.q_len + first_row", "work.q_len + token"),
    "whole tiles alone": (LAST, WRONG, "if count >= tile.shape[0]:", "if True:"),
    "too many tokens": (LAST, WRONG, "(local < count)", "(local < count + 1)"),
    "too few tokens": (LAST, WRONG, "(local < count)", "(local + 1 < count)"),
    "the first head": (LAST, WRONG, "h * target.head_stride", "0 * target.head_stride"),
    "too many columns": (LAST, WRONG, "(columns < target.dim)", "(columns >= 0)"),
    "tokens of no document": (replace(LAST, behind=9), WRONG, "gl.where(outside, NOWHERE, work.lo)", "work.lo"),
    "row blocks that do not exist": (
        Launch((20, 9), columns=(128, 128)), "negative row", "    if row >= 0:\n        if target",
        "    if True:\n        if target",
    ),
    "facts overwritten": (Launch((40, 1, 17), ctas=1), WRONG, "return q_stages + 1 + packed", "return q_stages + 1"),
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_seen(control: str) -> None:
    """With one line of the kernel changed for the worse a launch that was right fails, or its numbers are wrong."""
    launch, fault, old, new = CONTROLS[control]
    launch.run().check()
    with pytest.raises((Fault, AssertionError, RuntimeError, IndexError), match=fault):
        in_some_orders(launch, ((old, new),))


def in_some_orders(launch: Launch, edits: tuple[tuple[str, str], ...]) -> None:
    """Runs and checks the launch with edits of the source, in some orders of events."""
    for seed in range(4):
        launch.run(seed=seed, late=not seed, edits=edits).check()
