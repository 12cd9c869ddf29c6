"""The two main kernels of a forward under a mask of segment ids, run as plain Python on numbers.

See Note [Documents of a mask] in `kernels.common.document_tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dash_inductor.kernels.common.document_tiles import shapes_by_mask
from dash_inductor.kernels.common.score import LOG2E
from dash_inductor.kernels.hopper.forward import build
from dash_inductor.kernels.reference.backward import visible
from dash_inductor.model import Band
from dash_inductor.model.plan import Tiles
from dash_inductor.schedule import Problem
from dash_inductor.schedule.document_tiles import EVERYWHERE, WORDS, q_tiles

from ....support import forward_tables
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
    data_arguments,
)

ROWS, BLOCK_KV, SCALE = 8, 16, 0.3
TOKENS = 90
Tensors = tuple[Tensor, Tensor, Tensor]
RETURNS = "an id returns"
CAUSAL = Band(0)


@dataclass(frozen=True)
class Launch:
    """The launches of a forward in small: row blocks of ROWS rows, kv tiles of BLOCK_KV keys, TOKENS tokens.

    Args:
        elements: the lengths of each batch element's documents, which have together TOKENS tokens; or RETURNS.
        columns: a key of `build.FORWARD_CONFIGS`.
        order: the dimensions of the output from the largest stride to the smallest.
    """

    elements: tuple[tuple[int, ...] | str, ...]
    band: Band = CAUSAL
    columns: tuple[int, int] = (64, 64)
    dims: tuple[int, int] = (16, 8)
    group: int = 1
    kv_heads: int = 1
    ctas: int = 3
    order: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def batch(self) -> int:
        return len(self.elements)

    @property
    def ids(self) -> Tensor:
        """Of each token the first token with the same id: int32 [batch, TOKENS]."""
        found = []
        for lengths in self.elements:
            if isinstance(lengths, str):
                numbers = torch.arange(TOKENS) // 7 % 3
            else:
                numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            found.append((numbers == numbers[:, None]).int().argmax(1))
        return torch.stack(found).int()

    @property
    def keep(self) -> Tensor:
        band = visible(self.band, torch.arange(TOKENS), torch.arange(TOKENS))
        return (self.ids[:, :, None] == self.ids[:, None]) & band

    def tensors(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.heads, 0), (self.kv_heads, 0), (self.kv_heads, 1))
        q, k, v = (
            torch.randn(self.batch, heads, TOKENS, self.dims[i], generator=generator).bfloat16() for heads, i in shapes
        )
        return q, k, v

    @property
    def listed(self) -> build.Specialisation:
        """The specialisation of the kernel that reads lists of kv tiles."""
        return build.Specialisation("bfloat16", *self.columns, traits_of(self.band, True), False, elements=True)

    def run(self, tensors: Tensors | None = None, **how: Any) -> Ran:
        q, k, v = tensors or self.tensors()
        lo, hi = self.band.lo, self.band.hi
        shape = (*q.shape[:3], v.shape[3])
        inverse = [self.order.index(dim) for dim in range(4)]
        out = Output(torch.empty([shape[dim] for dim in self.order], dtype=q.dtype).permute(inverse))
        lse = Output(torch.empty(shape[:3]))
        others = [b for b, lengths in enumerate(self.elements) if isinstance(lengths, str)]
        found = [
            (sum(lengths[:i]), sum(lengths[:i]), length, b)
            for b, lengths in enumerate(self.elements)
            if not isinstance(lengths, str)
            for i, length in enumerate(lengths)
        ]
        consumers = build.FORWARD_CONFIGS[self.columns].consumers
        listed = q_tiles(found, Problem(self.band, TOKENS, TOKENS, ROWS, BLOCK_KV), consumers)
        room = shapes_by_mask(self.batch, TOKENS, Tiles(ROWS * consumers, BLOCK_KV, 8, 2))[0][0]
        work_list = torch.full((max(room, 1 + len(listed)), WORDS), 9999, dtype=torch.int32)
        work_list[: 1 + len(listed)] = torch.tensor([(len(listed), *[0] * (WORDS - 1)), *listed])
        elements = torch.full((1 + self.batch,), 9999, dtype=torch.int32)
        elements[: 1 + len(others)] = torch.tensor([len(others), *others])
        sizes = {
            "q_heads": self.heads, "group": self.group, "q_len": TOKENS, "kv_len": TOKENS, "hi": hi or 0,
            "scale_log2": SCALE * LOG2E,
        }  # fmt: skip
        both = {
            "q_desc": Descriptor(q), "k_desc": Descriptor(k), "v_desc": Descriptor(v), "out_desc": out,
            "lse_ptr": Pointer(lse), "counter_ptr": None,
        }  # fmt: skip
        chunk = how.pop("head_chunk", min(2 * self.group, self.heads))
        of_documents = sizes | {
            "batch_heads": self.heads, "lo": EVERYWHERE if lo is None else lo, "head_chunk": chunk,
            "last_head_chunk": self.heads // chunk * chunk,
        }  # fmt: skip
        of_lists = sizes | {
            "batch_heads": self.batch * self.heads, "lo": lo or 0, "head_chunk": self.heads,
            "last_head_chunk": self.batch * self.heads,
        }  # fmt: skip
        data = forward_tables.of_segment_ids(
            self.ids, self.ids, visible(self.band, torch.arange(TOKENS), torch.arange(TOKENS)), lo is not None,
            consumers, BLOCK_KV, ROWS,
        )  # fmt: skip
        launches = (
            (self.listed.by_documents(), arguments_of(
                **both, problem=of_documents, documents={"q_tiles_ptr": Pointer(Input(work_list))},
                target=(Pointer(out), *out.tensor.stride()[:3], v.shape[3]),
            )),
            (self.listed, arguments_of(
                **both, problem=of_lists, data=data_arguments(data, 1), elements={"ptr": Pointer(Input(elements))},
            )),
        )  # fmt: skip
        for of, arguments in launches:
            constants = constants_of(of, BLOCK_KV=BLOCK_KV, EVEN_KV=False)
            ForwardSimulation(constants, arguments, self.ctas, rows=ROWS, **how).run()
        return Ran(self, out, lse, (q, k, v))


@dataclass
class Ran:
    launch: Launch
    out: Output
    lse: Output
    tensors: Tensors

    def check(self) -> None:
        """Everything is written once, and numbers are attention's."""
        assert (self.out.writes == 1).all()
        assert (self.lse.writes == 1).all()
        q, k, v = (t.double() for t in self.tensors)
        k, v = (t.repeat_interleave(self.launch.group, 1) for t in (k, v))
        s = (q @ k.mT * SCALE).masked_fill(~self.launch.keep[:, None], -torch.inf)
        tolerance = 1e-5 + rounding_of(self.launch.listed)
        torch.testing.assert_close(self.lse.tensor.double(), s.logsumexp(-1), rtol=1e-5, atol=tolerance)
        torch.testing.assert_close(self.out.tensor.double(), s.softmax(-1) @ v, rtol=1e-2, atol=1e-2)


SHORT = (5, 1, 30, 8, 7, 39)
LAUNCHES = [
    Launch(((TOKENS,),)),
    Launch((SHORT, (60, 30), RETURNS), kv_heads=2, order=(0, 2, 1, 3)),
    Launch((RETURNS, SHORT, RETURNS, (16, 74)), Band(), (128, 128), group=2, order=(2, 0, 1, 3)),
    Launch((RETURNS,) * 3, Band(0, 20), group=3, ctas=2),
    Launch((SHORT,) * 3, Band(-7, 12), (192, 128), kv_heads=2, ctas=5),
    Launch(((1, 89), RETURNS), Band(None, 4), (128, 128), kv_heads=3),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_roles_compute_attention(launch: Launch) -> None:
    """Copies that arrive late and all CTAs at once; copies at any time and one CTA after the other."""
    launch.run(late=True).check()
    launch.run(seed=1, resident=1).check()


def test_bits_of_an_element_depend_on_itself_alone() -> None:
    """Beside other batch elements, of either kind and full of NaN, at any place of the batch."""
    for own in (SHORT, RETURNS):
        alone = Launch((own,), kv_heads=2)
        tensors = alone.tensors()
        expected = alone.run(tensors)
        for elements in ((own, SHORT), (RETURNS, own), ((60, 30), RETURNS, own, SHORT)):
            launch = replace(alone, elements=elements)
            place = elements.index(own)
            others = launch.tensors()
            for whole, t in zip(others, tensors, strict=True):
                whole *= torch.nan
                whole[place] = t[0]
            found = launch.run(others, seed=2)
            assert torch.equal(found.out.tensor[place], expected.out.tensor[0])
            assert torch.equal(found.lse.tensor[place], expected.lse.tensor[0])


LAST = Launch((SHORT, RETURNS, (60, 30)), kv_heads=2, order=(0, 2, 1, 3))
CONTROLS = {
    "the first element": ("length, b = entry", "length, _b = entry"),
    "values of another element": ("load_rows(desc, b, head, token + kv", "load_rows(desc, 0, head, token + kv"),
    "results of another element": ("b * target.batch_stride", "0 * target.batch_stride"),
    "elements by number": ("            b = data.element(b)\n", ""),
    "lists of another element": ("work, data.element(b), head, q_tile", "work, b, head, q_tile"),
    "too many elements": ("batch_heads = gl.load(elements.ptr) * problem.q_heads", "pass"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_faults_are_seen(control: str) -> None:
    """With one line of the kernel changed for the worse a launch that was right fails, or its numbers are wrong."""
    LAST.run().check()
    with pytest.raises((Fault, AssertionError, RuntimeError, IndexError)):
        in_some_orders((CONTROLS[control],))


def in_some_orders(edits: tuple[tuple[str, str], ...]) -> None:
    """Runs and checks the launches with edits of the source, in some orders of events."""
    for seed in range(4):
        LAST.run(seed=seed, late=not seed, edits=edits).check()
