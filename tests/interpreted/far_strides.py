"""Run in Triton's interpreter: kernels give the same bits for elements that lie far apart, in memory reserved for them.

    python -m tests.interpreted.far_strides KIND COUNT ...

A program of its own, as it claims a GPU.  Kinds are those of `KINDS`; prints what was compared.  An offset that has
lost its upper bits is an address of nothing, or of zeros.
"""

from __future__ import annotations

import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"

from ..support.mockgpu import install_driver  # Triton reads the environment when it is imported

install_driver()

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config as inductor_config  # noqa: E402
from torch import Tensor  # noqa: E402

from dash_inductor import lowering  # noqa: E402
from dash_inductor.kernels.common import mask_tables  # noqa: E402
from dash_inductor.model import AttentionSpec, Plan, Tiles  # noqa: E402
from dash_inductor.passes.ops.kernels.groups.launch import fill_behind  # noqa: E402
from dash_inductor.passes.ops.kernels.sums import launch  # noqa: E402
from dash_inductor.passes.ops.kernels.sums import one_hot_matmul as few  # noqa: E402

from ..support.paired import step  # noqa: E402
from ..support.table_words import data_of, interval_of, plan_of, same_tables, with_values  # noqa: E402
from ..support.tile_pairs import random_mask  # noqa: E402
from .scores import BATCH, DIM, KV_HEADS, LENGTH, Q_HEADS, TILES, extras  # noqa: E402
from .strides import STEPS, far_apart, with_strides  # noqa: E402


def sums(rng: random.Random) -> None:
    """Of segments, by scans and by tile schedules, and of few rows."""
    launch.NARROW, launch.ELEMENTS, launch.ENTRIES = rng.choice((0, 64)), 512, 8
    launch.WALKED, launch.COLUMNS = 8, 16
    few.CHUNK, few.OF_A_ROW, few.STEP, few.COLUMNS = 32, 1, 16, 16
    batch, rows, columns, count = rng.choice((1, 3)), rng.choice((3, 20)), rng.choice((1, 5, 33)), rng.choice((7, 80))
    dtype = rng.choice((torch.float32, torch.float16))
    values, base = torch.randn(batch, count, columns).to(dtype), torch.randn(batch, rows, columns).to(dtype)
    numbers = torch.randint(0, rows + 1, (count,), dtype=torch.int32)
    keys, order = numbers.sort(stable=True)
    far = far_apart(values, rng), far_apart(base, rng)
    for found, near in (
        (launch.add_segments(far[1], far[0], keys, order, rows), launch.add_segments(base, values, keys, order, rows)),
        (few.add_few(far[1], far[0], numbers, rows), few.add_few(base, values, numbers, rows)),
    ):
        assert torch.equal(found, near)


def behind(rng: random.Random) -> None:
    """What groups leave unwritten, in rows that lie far apart."""
    out = torch.randn(rng.choice((5, 40)), 8)
    wide = with_strides(out, (rng.choice(STEPS), 1))
    dim = rng.choice((0, 1))
    offsets = torch.tensor([1, rng.randrange(out.shape[dim])], dtype=torch.int32)
    fill_behind(out, offsets, dim)
    fill_behind(wide, offsets, dim)
    assert torch.equal(out.nan_to_num(9.0), wide.nan_to_num(9.0))


def tables(rng: random.Random) -> None:
    """Of masks whose vectors, intervals and dense masks have far strides."""
    mask = random_mask(rng, 40, batch=rng.choice((1, 2)))
    data = data_of(mask, rng, dense=rng.random() < 0.5)
    if data.dense is None:
        data = with_values(data, interval=interval_of(rng, data))
    mask_tables.ROW_BLOCK = 16
    plan = plan_of(rng, data.band, None, mask_tables.ROW_BLOCK)
    values = tuple((kind, {name: far_apart(value, rng) for name, value in of.items()}) for kind, of in data.values)
    same_tables(mask_tables.build(replace(data, values=values), plan), mask_tables.build(data, plan))


CALLS = [
    ("causal/scale=0.25", "", "spt", torch.float32),
    ("causal & segments(0,0)/scale=0.25/bias=1", "ib", "two_pass", torch.float32),
    ("band(-9,30) & interval(0,1,none)/scale=0.25/grad_logsumexp=2", "lug", "spt", torch.float16),
    ("dense(0)/scale=0.25/sinks=1", "dr", "two_pass", torch.float32),
]


def attention(rng: random.Random) -> None:
    """The portable kernels, through Inductor, which chooses the dtype of indices."""
    torch._dynamo.reset()
    text, names, schedule, dtype = rng.choice(CALLS)
    spec, given = AttentionSpec.parse(text), extras(names)
    tensors = [torch.randn(BATCH, h, LENGTH, DIM, dtype=dtype) for h in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS)]
    order = (0, 1, 2, 3)
    calls = str(replace(spec.of_forward, orders=(order,))), str(replace(spec.of_backward, orders=(order,) * 3))
    dq = TILES if schedule == "two_pass" else None
    plan = str(Plan("portable", schedule, "portable", Tiles(16, 32, 4, 1), dq, head_chunk=3, forward_tiles=TILES))
    compiled = torch.compile(step, dynamic=False)
    near = compiled(*tensors, given, calls, plan)
    torch._dynamo.reset()

    def far(tensor: Tensor) -> Tensor:
        return far_apart(tensor, rng) if rng.random() < 0.8 else tensor

    found = compiled(*map(far, tensors), [far(tensor) for tensor in given], calls, plan)
    assert [torch.equal(a, b) for a, b in zip(found, near, strict=True)] == [True] * len(near), text


KINDS = {kind.__name__: kind for kind in (sums, behind, tables, attention)}


def main(words: list[str]) -> None:
    inductor_config.cpu_backend = "triton"
    lowering.register()
    for kind, count in zip(words[::2], map(int, words[1::2]), strict=True):
        for seed in range(count):
            torch.manual_seed(seed)
            try:
                KINDS[kind](random.Random(seed))
            except Exception as error:
                raise RuntimeError(f"{kind}, seed {seed}") from error
        print("RESULT", kind, count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
