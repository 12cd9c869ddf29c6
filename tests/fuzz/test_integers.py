"""What is proved of integers, on random graphs of the operators that proofs know, against their values."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from dash_inductor.passes.ops.evaluated import evaluated
from dash_inductor.passes.ops.operators.distinct import put_distinct
from dash_inductor.passes.ops.uniqueness import distinct_along, inverted, lists_of, values_of

from ..support.fuzzed import cases, drawn
from .integer_claims import check, traced, values_in

Step = Callable[[random.Random, list[Tensor]], Tensor]
"""Makes a tensor of integers from those that there are."""

NEAR = [-(2**63), -(2**31), -(2**31) + 3, -7, -2, -1, 0, 1, 2, 3, 5, 2**31 - 9, 2**31 - 1, 2**40, 2**62]


def _one(r: random.Random, given: list[Tensor]) -> Tensor:
    return r.choice(given)


def _flat(r: random.Random, given: list[Tensor]) -> Tensor:
    return _one(r, given).reshape(-1)


def _number(r: random.Random, t: Tensor, least: int = -(2**63)) -> int:
    info = torch.iinfo(t.dtype)
    return r.choice([n for n in NEAR if max(info.min, least) <= n <= info.max])


def _divided(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _one(r, given)
    by = _number(r, t) or 1
    return torch.div(t, by, rounding_mode=r.choice(["floor", "trunc"])) if r.random() < 0.6 else t // by


def _remainder(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _one(r, given)
    return t % (_number(r, t) or 2)


def _clamped(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _one(r, given)
    low, high = (r.choice([None, _number(r, t)]) for _ in range(2))
    return t.clamp(low, high) if (low, high) != (None, None) else t.clamp(min=0)


def _picked(r: random.Random, given: list[Tensor]) -> Tensor:
    t, by = _flat(r, given), _flat(r, given)
    return t[by % max(t.numel(), 1)] if r.random() < 0.5 or not t.numel() else t[torch.argsort(by) % t.numel()]


def _jumped(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _flat(r, given)
    order = torch.argsort(t)
    for _ in range(r.randrange(4)):
        order = order[order] if r.random() < 0.7 else order.gather(0, order)
    return order


def _numbers(r: random.Random, count: int) -> Tensor:
    return torch.arange(
        count, dtype=r.choice([torch.int64, torch.int64, torch.int32, torch.uint8, torch.float32])
    ).long()


def _put(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _flat(r, given)
    order, into = torch.argsort(t), torch.full((t.numel(),), r.choice([-1, 0]))
    numbers = _numbers(r, t.numel())
    return r.choice([
        lambda: into.index_put((order,), numbers, accumulate=r.random() < 0.3),
        lambda: into.scatter(0, order, numbers),
        lambda: into.scatter_add(0, order, numbers),
        lambda: put_distinct(order, numbers, t.numel(), 0, None),
        lambda: put_distinct(order, numbers, t.numel() + 2, 0, -1),
    ])()  # fmt: skip


def _cat(r: random.Random, given: list[Tensor]) -> Tensor:
    parts = [_flat(r, given) for _ in range(r.choice([1, 2, 3]))]
    return torch.cat(parts)


def _selected(r: random.Random, given: list[Tensor]) -> Tensor:
    t = _flat(r, given)
    lines = t[: t.numel() // 2 * 2].reshape(2, -1)
    return r.choice([
        lambda: lines.select(0, r.randrange(2)),
        lambda: lines.unbind(0)[1],
        lambda: lines.t(),
        lambda: lines.flip(r.choice([0, 1])),
        lambda: lines.roll(1, r.choice([0, 1])),
        lambda: lines.argsort(dim=r.choice([0, 1]), descending=r.random() < 0.5),
        lambda: lines.sort(dim=r.choice([0, 1])).values,
        lambda: lines.topk(lines.shape[1] // 2, 1).indices,
        lambda: t.split(3)[-1] if t.numel() else t,
        lambda: t[r.randrange(3) :: r.choice([1, 2])],
        lambda: t.narrow(0, 0, t.numel() // 2),
    ])()  # fmt: skip


STEPS: list[Step] = [
    _divided, _remainder, _clamped, _picked, _jumped, _put, _cat, _selected,
    lambda r, given: (t := _one(r, given)) + _number(r, t),
    lambda r, given: (t := _one(r, given)) - _number(r, t),
    lambda r, given: (t := _one(r, given)) * _number(r, t),
    lambda r, given: torch.add(_one(r, given), 2, alpha=r.choice([1, 3])),
    lambda r, given: _one(r, given) + _one(r, given).reshape(-1)[:1].sum(),
    lambda r, given: _one(r, given).to(r.choice([torch.int32, torch.int64])),
    lambda r, given: _one(r, given).to(r.choice([torch.int16, torch.uint8, torch.int8])).long(),
    lambda r, given: torch.arange(r.randrange(13), dtype=r.choice([torch.int32, torch.int64])),
    lambda r, given: torch.arange(r.randrange(-3, 3), r.randrange(4, 20), r.choice([1, 2, 3])),
    lambda r, given: _flat(r, given).unsqueeze(-1).expand(-1, r.choice([1, 2, 3])),
    lambda r, given: _flat(r, given).repeat(r.choice([1, 2])),
]  # fmt: skip


def program(seed: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        r, given = drawn(seed, "integers"), [x]
        for _ in range(r.randrange(2, 9)):
            step = r.choice(STEPS)
            made = step(r, given)
            if 0 < made.numel() < 300:
                given.append(made)
        return given[-1] + 0

    return run


def test_claims_hold() -> None:
    """On inputs with equal numbers, negative ones and such at the ends of their dtype."""
    said, seeds = 0, cases(150)
    for seed in seeds:
        r = drawn(seed, "inputs")
        x = torch.randint(-3, 9, (r.choice([1, 2, 5, 12]),), dtype=r.choice([torch.int64, torch.int32]))
        if r.random() < 0.3:
            x[0] = r.choice([torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max])
        module = traced(program(seed), x)
        values = values_in(module, x)
        for node, value in values.items():
            if node.op == "call_function" and value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
                try:
                    said += any(check(node, values))
                except AssertionError as error:
                    raise AssertionError(f"{seed}: {node.format_node()}") from error
    assert said > len(seeds) // 4


POSITIONS: list[Callable[..., Tensor]] = [
    lambda x, other, number, least, largest: x + number,
    lambda x, other, number, least, largest: x - number,
    lambda x, other, number, least, largest: x * number,
    lambda x, other, number, least, largest: x.clamp(least, largest),
    lambda x, other, number, least, largest: x.clamp(min=least),
    lambda x, other, number, least, largest: x.clamp(max=largest),
    lambda x, other, *_: x + 0.5,
    lambda x, other, *_: x * 0.25,
    lambda x, other, *_: x.float(),
    lambda x, other, *_: x.double(),
    lambda x, other, *_: x.to(torch.int64),
    lambda x, other, *_: x.to(torch.int32),
    lambda x, other, *_: x.floor() if x.is_floating_point() else x,
    lambda x, other, *_: x.unsqueeze(-1).reshape(-1),
    lambda x, other, *_: x - other,
]


def positions(r: random.Random) -> Tensor:
    """A tensor that depends on positions alone."""
    dtype = r.choice([torch.int64, torch.int64, torch.int32])
    start, step = r.choice([0, 0, 3, -4, 2**24 - 5, 2**31 - 40]), r.choice([1, 1, 2, 3])
    x = torch.ops.prims.iota(
        r.choice([1, 5, 13]), start=start, step=step, dtype=dtype, device="cpu", requires_grad=False
    )
    other = x
    for _ in range(r.randrange(1, 7)):
        floats = [0.5, 1.5, 0.1, -0.3, 2.0, 1e-3, 3e4, 16777216.0]
        number = r.choice([*range(-3, 5), 7, 2**20, 2**30, 2**31 - 1] if not x.is_floating_point() else floats)
        least, largest = sorted(r.sample(floats if x.is_floating_point() else [-3, 0, 4, 9, 2**30], 2))
        x, other = r.choice(POSITIONS)(x, other, number, least, largest), x
    return x


def test_bounds_hold() -> None:
    """An index is evaluated to bounds that hold, or not at all."""
    found, seeds = 0, cases(200)
    for seed in seeds:
        program = functools.partial(positions, drawn(seed, "positions"))
        module = make_fx(program, select_decomp_table(), tracing_mode="fake")()
        (node,) = module.graph.output_node().all_input_nodes
        bounds, value = evaluated(node), module().double()
        if bounds is not None:
            found += 1
            assert ((bounds[0] <= value) & (value <= bounds[1])).all(), (seed, bounds, value, module.code)
    assert found > len(seeds) // 4


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda p: p[p],
    "gather": lambda p: p.gather(0, p),
    "cat": lambda p: torch.cat([p[: p.shape[0] // 2], p[p.shape[0] // 2 :]])[p],
    "stored": lambda p: torch.empty_like(p).index_put((p,), torch.arange(p.numel())),
    "scattered": lambda p: torch.zeros_like(p).scatter(0, p, torch.arange(p.numel())),
    "sorted": lambda p: p.sort(stable=True).indices,
    "divided": lambda p: (p // 1)[p % 64],
    "shifted": lambda p: (p + 1 - 1)[p],
    "clamped": lambda p: p.clamp(0, 63)[p.clamp(0, 63)],
    "expanded": lambda p: p.unsqueeze(1).expand(-1, 1).reshape(-1)[p],
    "split": lambda p: torch.cat(p.split(7))[p],
    "converted": lambda p: p.to(torch.int32).to(torch.int64)[p],
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_take_steps_in_proportion_to_their_length(name: str) -> None:
    def chain(x: Tensor) -> Tensor:
        p = torch.argsort(x, stable=True)
        for _ in range(64):
            p = CHAINS[name](p)
        return p

    (node,) = traced(chain, torch.randint(0, 9, (64,))).graph.output_node().all_input_nodes
    begin = time.process_time()
    known = values_of(node), distinct_along(node, 0), inverted(node), lists_of(node, 64)
    assert time.process_time() - begin < 2
    assert known[0] is not None
    if name not in ("cat", "split"):
        assert known[0].is_permutation(64)


def test_bounds_of_a_chain() -> None:
    """Each node is read twice by the next one."""

    def chain() -> Tensor:
        x = torch.arange(8)
        for _ in range(60):
            x = x - (x - 1)
        return x

    (node,) = make_fx(chain, select_decomp_table(), tracing_mode="fake")().graph.output_node().all_input_nodes
    begin = time.process_time()
    evaluated(node)
    assert time.process_time() - begin < 2
