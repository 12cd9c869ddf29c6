"""Random mask programs, and whether what `recognise` says of them is true of the masks that they compute.

``python -m tests.masks.programs --programs 5000 --seed 7`` runs thousands and prints those that are read wrongly
as Python source; `tests/masks/test_fuzz.py` runs a few hundred.

A program is a function of query, key, a number and two vectors of data, written from what mask code is written from:
positions (arange, cumsum, cat, slices, rolls, casts, arithmetic), comparisons, triangles, logic, and additive forms;
some programs go on with predicates of the data.  Most steps keep what the components of a mask need, some break it;
some programs return a second mask that differs in one number.  It is traced, with static or with dynamic lengths, read,
and then run eagerly at many lengths: the components must be the mask at every one of them.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast
from unittest import mock

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from dash_inductor.masks import recognition as masks
from dash_inductor.masks import verification
from dash_inductor.masks.normal_form import Components
from dash_inductor.masks.recognition import MaskResult

from ..support.mask_graphs import assert_visible, trace_mask, visible_by

LENGTHS = ((12, 20), (20, 12), (16, 16), (5, 9), (9, 5), (24, 23), (3, 17), (1, 14), (13, 1), (140, 300))
"""Lengths (query, key) at which programs are traced."""

OTHER_LENGTHS = (2, 3, 5, 8, 11, 19, 31, 64, 130, 300)
"""Lengths, of query and of key, at which dynamic programs are run."""

DATA = 0.4
"""How many of the programs read data."""

FEW_SIZES = 12
"""At so many sizes programs that read data are run."""

NUMBERS = (6, -3, 11, -1, 0)
"""Values of the number w."""

DTYPES = ("torch.int64", "torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8", "torch.float32")


@dataclass(frozen=True)
class Program:
    """A mask program.

    Args:
        source: Python source of ``make(q, k, w, dq, dk)``, which returns masks; q is [B, H, q_len, D], k is
            [B, H, kv_len, D], w a number, dq [B, q_len] and dk [B, kv_len] are data of queries and keys.
        q_len, kv_len, w: what it is traced with.
        dynamic: whether these are traced as symbols.
    """

    source: str
    q_len: int
    kv_len: int
    w: int
    dynamic: bool

    def __str__(self) -> str:
        traced = f"q_len={self.q_len}, kv_len={self.kv_len}, w={self.w}, dynamic={self.dynamic}"
        return f"# {traced}\n{self.source}"

    @property
    def reads_data(self) -> bool:
        return bool(re.search(r"\bd[qk]\b", re.sub(r"\(q, k, w, dq, dk\)", "", self.source)))

    def make(self, q: Tensor, k: Tensor, w: int, dq: Tensor, dk: Tensor) -> tuple[Tensor, ...]:
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(self.source, scope)
        return cast(tuple[Tensor, ...], scope["make"](q, k, w, dq, dk))

    def masks(self, q_len: int, kv_len: int, w: int) -> tuple[Tensor, ...]:
        """The masks that the program computes, [2, 2, q_len, kv_len]."""
        masks = self.make(*tokens(q_len, kv_len), w, *data(q_len, kv_len))
        return tuple(mask.expand(2, 2, q_len, kv_len) for mask in masks)


def tokens(q_len: int, kv_len: int) -> list[Tensor]:
    """A query and a key."""
    return [torch.zeros(2, 2, n, 4) for n in (q_len, kv_len)]


def data(q_len: int, kv_len: int) -> list[Tensor]:
    """Small numbers for every query and every key."""
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    return [torch.randint(-1, 4, (2, n), generator=generator) for n in (q_len, kv_len)]


class Writer:
    """Writes one random program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lines: list[str] = []

    def keep(self, prefix: str, expression: str) -> str:
        """A variable of this value."""
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def number(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 5, 7, 9, 30, -1, -1, -2, -4, -12))

    def size(self) -> str:
        """A number that may depend on the lengths."""
        c = str(abs(self.number()))
        return self.pick(
            c, c, c, "(K - Q)", "(K - Q)", f"(K - Q - {c})", "(Q - K)", "Q", "K", f"K // {abs(self.number()) + 1}", "w"
        )

    def ramp(self, n: str) -> str:
        """0, 1, ..., n - 1, in one of the ways in which this is written."""
        c = self.rng.randint(1, 4)
        return self.keep(
            "p",
            self.pick(
                f"torch.arange({n})",
                f"torch.arange({n})",
                f"torch.arange({n}, dtype={self.pick(*DTYPES)})",
                f"torch.ones({n}, dtype={self.pick(*DTYPES[:6])}).cumsum(0) - 1",
                f"torch.arange({n} + {c})[:{n}]",
                f"torch.arange({n} + {c})[{c}:] - {c}",
                f"torch.arange({n} + {c})[-{n}:] - {c}",
                f"torch.arange({n} + {c})[:-{c}]",
                f"torch.cat([torch.arange({c}), torch.arange({c}, {n} + {c})])[:{n}]",
                f"torch.arange({n}).repeat({c})[:{n}]",
                f"torch.arange({n}).flip(0).flip(0)",
                f"{n} - 1 - torch.arange({n}).flip(0)",
                f"torch.arange(0, {c} * {n}, {c}) // {c}",
                f"torch.arange({c} * {n})[::{c}] // {c}",
                f"torch.arange({n})[torch.arange({n})]",
                f"torch.arange({n})[torch.arange({n}) - {n}]",
                f"torch.arange({n}).expand(2, {n})[{self.pick('0', '1', '-1', '-2')}]",
                f"torch.arange(2 * {n}).view(2, {n})[0]",
                f"torch.arange({n}).unfold(0, 1, 1).sum(-1)",
                f"torch.arange({n}).roll(0)",
                f"torch.arange({n}).clamp({self.pick('min=0', f'max={n}', f'min=0, max={n} - 1', '0, 500')})",
                f"torch.where(torch.arange({n}) >= {c}, torch.arange({n}), torch.arange({n}))",
                f"F.pad(torch.arange({n}), ({c}, {c}))[{c}:-{c}]",
            ),
        )

    def bent(self, p: str, n: str) -> str:
        """Something else than positions, or the same in another type."""
        c = self.number()
        return self.keep(
            "p",
            self.pick(
                f"{p}.roll({c})",
                f"{p}.flip(0)",
                f"{p} * {self.pick('2', '3', '-1', '100', '0', '20_000_000', 'K', 'w', '(K - Q)')}",
                f"{p} // {self.pick('2', '3', '-2', '64', 'Q', 'w', '(K - Q)')}",
                f"{p} % {self.pick('2', '7', '-3', '500', 'K', 'w')}",
                f"torch.div({p} + {c}, {self.pick('2', '4', '-2')}, rounding_mode='{self.pick('trunc', 'floor')}')",
                f"{p} / {self.pick('2', '1', '-1')}",
                f"{p}.clamp({c}, {c + self.number()})",
                f"{p}.clamp(max={self.size()})",
                f"torch.where({p} > {c}, {p}, {p} + {self.number()})",
                f"torch.where({p} >= {self.size()}, {p}, {self.number()})",
                f"{p}.abs()",
                f"-{p}",
                f"{p}.to({self.pick(*DTYPES, 'torch.float16', 'torch.bfloat16', 'torch.bool')})",
                f"torch.maximum({p}, torch.full_like({p}, {c}))",
                f"{p}.cumsum(0)",
                f"torch.cat([{p}[{abs(c)}:], {p}[:{abs(c)}]])",
                f"torch.cat([{p}[:{abs(c)}], {p}[{abs(c)}:] + 1])",
                f"torch.full(({n},), {self.size()})",
                f"{p} + torch.full(({n},), {self.size()})",
                f"torch.add({p}, {p}, alpha={c})",
                f"{p}[:1].repeat({n})",
                f"{p} - {p}[-1]",
                f"{p} - torch.scalar_tensor({self.size()}, dtype=torch.int64)",
                f"{p}.to(torch.uint8) - {abs(c)}",
                f"{p}.bool()",
            ),
        )

    def positions(self, n: str) -> str:
        p = self.ramp(n)
        if self.rng.random() < 0.35:
            p = self.keep("p", f"{p} {self.pick('+', '-')} {self.size()}")
        if self.rng.random() < 0.2:
            p = self.keep("p", f"{p}.to({self.pick(*DTYPES)})")
        if self.rng.random() < 0.18:
            p = self.bent(p, n)
        return p

    def plane(self) -> str:
        """A bool tensor of query and key positions."""
        c, size, kind = self.number(), self.size(), self.rng.random()
        if kind < 0.6:
            dtype, scale = self.pick(*DTYPES), self.pick("2", "3", "w", "K", "(K - Q)", "20_000_000", "-1")
            rows, columns = f"{self.positions('Q')}[:, None]", f"{self.positions('K')}[None, :]"
            return self.keep(
                "m",
                self.pick(
                    f"{columns} {self.pick('<=', '<=', '<', '>=', '>', '==', '!=')} {rows}",
                    f"{columns} <= {rows} + {size}",
                    f"{columns} > {rows} - {size}",
                    f"{rows} - {columns} >= {c}",
                    f"({rows} - {columns}).abs() <= {abs(c)}",
                    f"{rows} - {columns} < {size}",
                    f"{rows} // {abs(c) + 1} >= {columns} // {abs(c) + 1}",
                    f"({rows} + {columns} >= {c})",
                    f"{columns} * {scale} <= {rows} * {scale}",
                    f"({columns}.to({dtype}) * {scale} <= {rows}.to({dtype}) * {scale})",
                    f"({columns} <= {rows}) & ({rows} * {self.pick('w', 'w * w', '(K - Q)')} >= {c})",
                ),
            )
        triangle = f"{self.pick('tril', 'triu')}({self.pick('', str(c), 'K - Q', size)})"
        return self.keep(
            "m",
            self.pick(
                f"torch.ones(Q, K, dtype=torch.bool).{triangle}",
                f"torch.ones(Q, K).{triangle} != 0",
                "torch.ones(K, K, dtype=torch.bool).tril()[-Q:]",
                "torch.ones(K, K).bool().tril()[K - Q:]",
                "torch.ones(Q + K, K).bool().tril()[K:]",
                "torch.ones(Q + K, Q + K).bool().tril()[:Q, :K]",
                "torch.ones(64, 64).bool().tril()[-Q:, -K:]",
                f"torch.ones(Q, K + {abs(c)}).bool().{triangle}[:, :K]",
                f"torch.ones(Q, K, dtype={self.pick(*DTYPES)}).{triangle} > 0",
                f"torch.ones(Q, 1, 2).sum(-1).{self.pick('gt(0)', 'ge(2)', 'gt(2)')}.expand(Q, K)",
                f"torch.{self.pick('ones', 'zeros')}(Q, K, dtype=torch.bool)",
                f"torch.full((), {self.pick('True', 'False', '1')}, dtype=torch.bool).expand(Q, K)",
                f"torch.ones(Q, K).cumsum(1) <= torch.ones(Q, K).cumsum(0) + {c}",
            ),
        )

    def changed(self, m: str) -> str:
        c, i, j = self.number(), self.rng.randrange(6), self.rng.randrange(6)
        here = f"((torch.arange(Q)[:, None] == {i}) & (torch.arange(K)[None, :] == {j}))"
        return self.keep(
            "m",
            self.pick(
                f"~{m}",
                f"{m} ^ {here}",
                f"{m} | {here}",
                f"torch.where({here}, ~{m}, {m})",
                f"{m}.roll({c}, {self.pick('0', '1')})",
                f"{m}.flip({self.pick('0', '1')})",
                f"{m}.flip(0).flip(0)",
                f"F.pad({m}, (0, {abs(c)}))[:, :{m}.shape[1]]",
                f"F.pad({m}, ({c}, {-c}), value={self.pick('True', 'False')})",
                f"torch.cat([{m}[:{abs(c)}], {m}[{abs(c)}:]])",
                f"torch.cat([{m}[:, :{abs(c)}], {m}[:, {abs(c)}:]], 1)",
                f"torch.cat([{m}[{abs(c)}:], {m}[:{abs(c)}]])",
                f"{m}.to({self.pick(*DTYPES)}) {self.pick('> 0', '!= 0', '>= 1', '== 1')}",
                f"{m}.to(torch.uint8) - 1 != 0",
                f"{m}.to(torch.int8).cumsum(0) > 0",
                f"{m}.logical_not().logical_not()",
                f"{m}.repeat(2, 1)[:{m}.shape[0]]",
                f"{m}.reshape(-1).view({m}.shape)",
                f"{m}.T.T",
                f"{m} > torch.zeros((), dtype=torch.bool)",
            ),
        )

    def combined(self, a: str, b: str) -> str:
        return self.keep(
            "m",
            self.pick(
                *[f"{a} & {b}"] * 6,
                f"{a} | {b}",
                f"{a} | ~{b}",
                f"{a} ^ {b}",
                f"{a} + {b}",
                f"{a} * {b}",
                f"{a} {self.pick('<', '<=', '>', '>=', '==', '!=')} {b}",
                f"torch.logical_and({a}, {b})",
                f"torch.minimum({a}, {b})",
                f"torch.where({a}, {b}, {self.pick(a, 'False', '~' + b)})",
                f"({a}.long() + {b}.long()) {self.pick('== 2', '>= 1', '> 1')}",
                f"{a}.float() * {b} > 0.5",
            ),
        )

    def of_tokens(self, d: str, n: str) -> str:
        """Numbers or truth values for every token, made from the data `d` of `n` tokens."""
        c = str(self.rng.choice((0, 0, 1, 2)))
        return self.keep(
            "d",
            self.pick(
                *[d] * 3,
                f"{d}.bool()",
                f"{d} {self.pick('!=', '>', '==', '<=')} {c}",
                f"{d} {self.pick('+', '-', '*', '//', '%')} {self.pick('1', '2', '3')}",
                f"{d}.to({self.pick(*DTYPES)})",
                f"{d}.cumsum(-1)",
                f"({d} != 1).cumsum(-1)",
                f"{d}.abs().clamp(max={c})",
                f"torch.diff({d}, prepend={d}[:, :1] - 1)",
                f"torch.arange({n}) < {d}.abs().sum(-1, keepdim=True)",
                f"torch.arange({n}).expand(B, {n}) + {d}",
                f"{d}.roll(1, -1)",
                f"{d}.flip(1)",
                f"{d}[:, :1].expand(B, {n})",
                f"{d}[:1]",
                f"{d}[0]",
                f"{d}.t().contiguous().t()",
                f"torch.cat([{d}[:, 1:], {d}[:, :1]], 1)",
                f"torch.where({d} > {c}, torch.arange({n}), 0)",
                f"{d}.float().sin()",
                f"{d}.any()[None, None].expand(1, {n})",
            ),
        )

    def truth(self, x: str) -> str:
        c = str(self.rng.choice((0, 0, 1, 2)))
        return self.pick(f"{x}.bool()", f"{x} != {c}", f"{x} > {c}", f"{x} == {c}", f"{x} <= {c}", f"~{x}.bool()")

    def of_data(self) -> str:
        """A bool tensor that broadcasts to [2, 1, Q, K], in which data decide."""
        keys, queries = self.of_tokens("dk", "K"), self.of_tokens("dq", "Q")
        at_key = self.pick(
            f"{keys}.reshape(-1, 1, 1, K)",
            f"{keys}.expand(B, K)[torch.arange(B)[:, None, None, None], torch.arange(K)]",
            f"{keys}.expand(B, K)[:, None, None].expand(B, 1, Q, K)",
        )
        at_query = self.pick(
            f"{queries}.reshape(-1, 1, Q, 1)",
            f"{queries}.expand(B, Q)[torch.arange(B)[:, None, None, None], torch.arange(Q)[:, None]]",
        )
        return self.keep(
            "m",
            self.pick(
                *[self.truth(at_key) for _ in range(8)],
                self.truth(at_query),
                *[f"{at_query} == {at_key}"] * 4,
                f"{at_query} {self.pick('<=', '!=', '>')} {at_key}",
                f"{at_key} <= torch.arange(Q)[:, None]",
                *[f"torch.arange(K) {self.pick('<', '<=', '>', '>=')} {at_query}" for _ in range(3)],
                f"torch.arange(K) {self.pick('<', '>=')} torch.arange(Q)[:, None] {self.pick('+', '-')} {at_query}",
                f"{at_query} {self.pick('>=', '<=')} {at_key}",
                f"(torch.arange(Q)[:, None] - {at_key}) // 4 == (torch.arange(K) - {at_key}) // 4",
                *[f"torch.arange(Q)[:, None] // {n} == torch.arange(K) // {n}" for n in (3, 8)],
            ),
        )

    def plain(self) -> str:
        """A band."""
        rows, columns = "torch.arange(Q)[:, None]", "torch.arange(K)"
        causal = f"{columns} <= {rows}"
        ones = "torch.ones(Q, K, dtype=torch.bool)"
        return self.keep("m", self.pick(causal, causal, f"({causal}) & ({columns} > {rows} - 5)", ones))

    def with_data(self, m: str) -> str:
        d = self.of_data()
        if self.rng.random() < 0.3:
            d = self.keep("m", f"{d} {self.pick('&', '&', '|', '^')} {self.of_data()}")
        return self.keep(
            "m",
            self.pick(
                *[f"{m} & {d}"] * 8,
                f"{m} & ~{d}",
                f"{m} | {d}",
                f"{m} ^ {d}",
                f"torch.where({d}, {m}, {self.pick('False', 'False', '~' + m)})",
                f"torch.where({self.truth('dk')}.any(), {m}, {d})",
                f"({m}.long() * {d}) {self.pick('> 0', '!= 0', '== 0')}",
                f"({m}.float() * {d}.float()) > 0.5",
                f"({m}.expand(B, 1, Q, K) & {d}).reshape(B * Q, K).reshape(B, 1, Q, K)",
                f"({m} & {d}).contiguous().expand(B, q.shape[1], Q, K)",
                f"{d}",
            ),
        )

    def final_of_data(self, m: str) -> str:
        lowest = self.pick(*["-torch.inf"] * 4, "torch.finfo(torch.float32).min")
        return self.pick(
            *[m] * 3,
            f"torch.where({m}, 0.0, {lowest})",
            f"torch.zeros(B, 1, Q, K).masked_fill(~{m}, {lowest})",
            f"(1.0 - {m}.float()) * torch.finfo(torch.float32).min",
            f"torch.where({m}, 0.0, {lowest}).expand(B, q.shape[1], Q, K)",
        )

    def final(self, m: str) -> str:
        dtype = self.pick("torch.float32", "torch.float32", "torch.bfloat16", "torch.float16")
        lowest = self.pick("-torch.inf", "-torch.inf", f"torch.finfo({dtype}).min")
        mask = self.keep(
            "mask",
            self.pick(
                *[m] * 3,
                f"torch.where({m}, 0.0, {lowest}).to({dtype})",
                f"torch.zeros(Q, K, dtype={dtype}).masked_fill(~{m}, {lowest})",
                f"torch.zeros(Q, K, dtype={dtype}).masked_fill({m}.logical_not(), {lowest})",
                f"(1.0 - {m}.to({dtype})) * torch.finfo({dtype}).min",
                f"torch.full((Q, K), {lowest}, dtype={dtype}).masked_fill({m}, 0)",
                f"torch.where({m}, 0.0, {lowest}) + torch.zeros(Q, K)",
            ),
        )
        return self.pick(mask, mask, f"{mask}[None, None]", f"{mask}[None, None].expand(q.shape[0], 1, -1, -1)")

    def program(self) -> Program:
        q_len, kv_len = self.rng.choice(LENGTHS)
        if self.rng.random() < DATA:
            plane = self.plain() if self.rng.random() < 0.7 else self.plane()
            self.lines.append(f"return {self.final_of_data(self.with_data(plane))}")
        else:
            mask = self.plane()
            for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
                mask = self.combined(mask, self.plane())
            for _ in range(self.rng.choice((0, 0, 0, 1, 2))):
                mask = self.changed(mask)
            self.lines.append(f"return {self.final(mask)}")
        text = "\n".join(f"    {line}" for line in ["B, Q, K = q.shape[0], q.shape[2], k.shape[2]", *self.lines])
        functions, returned = [f"def first(q, k, w, dq, dk):\n{text}\n"], "first(q, k, w, dq, dk),"
        if self.rng.random() < 0.3:
            functions.append(f"def second(q, k, w, dq, dk):\n{self.twin(text)}\n")
            returned += " second(q, k, w, dq, dk)"
        source = "\n".join([*functions, f"def make(q, k, w, dq, dk):\n    return {returned}\n"])
        return Program(source, q_len, kv_len, self.rng.choice(NUMBERS), self.rng.random() < 0.6)

    def twin(self, text: str) -> str:
        """The same with another number somewhere."""
        places = list(re.finditer(r"(?<![\w.\[])\d+(?![\w.:\]])", text))
        if not places:
            return text
        place = self.rng.choice(places)
        return f"{text[: place.start()]}{int(place.group()) + self.rng.choice((1, 2, 5))}{text[place.end() :]}"


def programs(seed: int, count: int) -> Iterator[Program]:
    """The first `count` programs of a seed; each depends on the seed and its number alone."""
    for number in range(count):
        yield Writer(random.Random(f"{seed}/{number}")).program()


def outcome(program: Program) -> str:
    """Read and check a program: "recognised", "recognised with data", "fallback", or "invalid" where it fails eagerly
    or cannot be traced.

    Raises:
        AssertionError: components are not their mask somewhere; the reader without its check of real values, and that
        check, disagree.
    """
    try:
        program.masks(program.q_len, program.kv_len, program.w)
        lengths = {"q_len": program.q_len, "kv_len": program.kv_len, "dynamic": program.dynamic}
        inputs = program.w, *data(program.q_len, program.kv_len)
        module = trace_mask(lambda *inputs: program.make(*inputs), *inputs, batch=2, **lengths)
    except Exception:
        return "invalid"
    with mock.patch.object(verification, "verify"):
        found = _read(module)
    components = [result.components for result in found]
    if not any(components):
        return "fallback"
    sizes = list(_sizes(program, module))
    if program.reads_data:
        sizes = [sizes[0], *random.Random(program.source).sample(sizes[1:], min(len(sizes) - 1, FEW_SIZES))]
    for chosen in sizes:
        _check(program, module, components, *chosen)
    masks.forget(module.graph)
    for unverified, verified in zip(found, _read(module), strict=True):
        # A dense mask that cannot be evaluated is not replaced for the reason why it is nothing better.
        failed = "cannot be evaluated" in verified.detail or (unverified.components and unverified.components.dense)
        agreed = verified == unverified or (unverified.components and verified.components is None and failed)
        assert agreed, f"{unverified}, but with real values {verified}"
    return "recognised with data" if any(t is not None and t.loads for t in components) else "recognised"


def _read(module: GraphModule) -> list[MaskResult]:
    query, key, *_ = _inputs(module)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [masks.recognise(mask, query=query, key=key) for mask in output.args[0]]


def _inputs(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _sizes(program: Program, module: GraphModule) -> Iterator[tuple[int, int, int]]:
    """Lengths and numbers: as in the trace, and for a dynamic program others that its guards allow."""
    yield program.q_len, program.kv_len, program.w
    query, key, number, *_ = (node.meta.get("val", program.w) for node in _inputs(module))
    given = [query.shape[2], key.shape[2], number]
    shape_env = next((n.node.shape_env for n in given if isinstance(n, torch.SymInt)), None)
    if shape_env is None:
        return
    expressions = [n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in given]
    guards = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    numbers = NUMBERS if re.search(r"\bw\b", program.source.replace("(q, k, w, dq, dk)", "")) else (program.w,)
    options = (OTHER_LENGTHS, OTHER_LENGTHS, numbers)
    for sizes in product(*((int(e),) if e.is_Integer else o for e, o in zip(expressions, options, strict=True))):
        chosen = {e: sympy.Integer(n) for e, n in zip(expressions, sizes, strict=True) if e.is_Symbol}
        possible = all(e.xreplace(chosen) == n for e, n in zip(expressions, sizes, strict=True))
        if possible and all(guard.xreplace(chosen) == sympy.true for guard in guards):
            yield sizes


def _check(
    program: Program, module: GraphModule, components: list[Components | None], q_len: int, kv_len: int, w: int
) -> None:
    try:
        computed = program.masks(q_len, kv_len, w)
    except Exception:
        return  # no mask, nothing to be wrong about
    inputs = *tokens(q_len, kv_len), w, *data(q_len, kv_len)
    run = Interpreter(module, garbage_collect_values=False)
    if any(found is not None and found.loads for found in components):
        run.run(*inputs)
    for number, (mask, found) in enumerate(zip(computed, components, strict=True)):
        if found is not None:
            expected = visible_by(module, found, inputs, lambda node: run.env[node])
            where = f"{found} is not mask {number} of {q_len} x {kv_len} with w={w}"
            assert_visible(mask, expected, where)


def run(seed: int, count: int) -> tuple[Counter[str], list[tuple[Program, Exception]]]:
    """Outcomes of the programs of a seed, and those that were read wrongly, with what is wrong."""
    outcomes: Counter[str] = Counter()
    wrong = []
    for program in programs(seed, count):
        try:
            outcomes[outcome(program)] += 1
        except Exception as error:
            outcomes["wrong"] += 1
            wrong.append((program, error))
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    options = parser.parse_args()
    began = time.monotonic()
    outcomes, wrong = run(options.seed, options.programs)
    for program, error in wrong:
        print(f"{program}# {type(error).__name__}: {error}\n")
    print(dict(outcomes), f"in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
