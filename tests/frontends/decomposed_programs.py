"""Random programs that compute attention by hand, from the parts that models put together.

``python -m tests.frontends.decomposed_programs --programs 500 --seed 7`` compares many with double precision.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dash_inductor.records.records import sites

from ..support.graphs import assert_as_exact, capture, step, tensors

DIM = 16
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class HandProgram:
    """An attention of query [batch, heads, q_len, DIM], key and value [batch, heads / group, kv_len, DIM].

    Attributes:
        layout: "heads" as they are, "flat" with batch and heads in one dimension, or "einsum" with heads behind.
        repeat: how key and value are repeated: "expand" or "interleave".
        scaled: what is multiplied by the scale: "query", "scores", "divided" for scores, "both" of query and key.
        mask: "", or how keys are hidden: a number "added", "filled" or chosen by "where"; `lowest` is that number.
        window: how far a causal mask reaches back; None for no end.
        padded: whether each batch element has keys of its own number.
        bias: the sizes that it has beside [heads or 1, q_len or 1, kv_len]: "" for no bias.
        first: whether the bias is added in front of the mask.
        dtype: of all tensors.
        cast: what is computed in float32 at least, where tensors have fewer bits: "" for nothing, the "softmax", all
            from the "scores" on, or from the "inputs" on; probabilities are rounded before the product with value.
    """

    batch: int
    heads: int
    group: int
    q_len: int
    kv_len: int
    layout: str
    repeat: str
    scaled: str
    scale: float
    softcap: float | None
    mask: str
    lowest: bool
    window: int | None
    padded: bool
    bias: str
    first: bool
    sinks: bool
    shifted: bool
    dtype: torch.dtype
    cast: str

    @staticmethod
    def drawn(seed: int) -> HandProgram:
        """The program of a seed."""
        r = random.Random(seed)
        q_len = r.choice((17, 24, 33))
        window = r.choice((None, None, 5))
        return HandProgram(
            batch=r.choice((1, 2, 3)),
            heads=r.choice((2, 4)),
            group=r.choice((1, 1, 2)),
            q_len=q_len,
            kv_len=r.choice((q_len, q_len, q_len + 7)),
            layout=r.choice(("heads", "heads", "flat", "einsum")),
            repeat=r.choice(("expand", "interleave")),
            scaled=r.choice(("query", "scores", "divided", "both")),
            scale=r.choice((0.25, 0.3, 1.0)),
            softcap=r.choice((None, None, 2.0, 5.0)),
            mask=r.choice(("", "added", "filled", "where")),
            lowest=r.random() < 0.5,
            window=window,
            padded=window is None and r.random() < 0.5,
            bias=r.choice(("", "", "heads", "plane", "keys", "batch")),
            first=r.random() < 0.5,
            sinks=r.random() < 0.4,
            shifted=r.random() < 0.3,
            dtype=r.choice((torch.float32, torch.bfloat16, torch.float16)),
            cast=r.choice(("", "softmax", "scores", "inputs")),
        )

    @property
    def shapes(self) -> tuple[Sizes, ...]:
        """Of query, key and value, the bias if there is one, and the sinks if there are some."""
        key = (self.batch, self.heads // self.group, self.kv_len, DIM)
        found: list[Sizes] = [(self.batch, self.heads, self.q_len, DIM), key, key]
        if self.bias:
            of_batch = self.batch if self.bias == "batch" else 1
            heads = self.heads if self.bias in ("heads", "batch") else 1
            found.append((of_batch, heads, 1 if self.bias == "keys" else self.q_len, self.kv_len))
        return (*found, (self.heads,)) if self.sinks else tuple(found)

    def visible(self, device: torch.device) -> Tensor:
        """Who sees whom: every query sees a key."""
        q, kv = torch.arange(self.q_len, device=device)[:, None], torch.arange(self.kv_len, device=device)
        found = q >= kv
        if self.window is not None:
            found = found & (q - kv < self.window) | (q >= self.kv_len)
        if self.padded:
            lengths = torch.arange(self.batch, device=device) * 5 + 3
            found = found & (kv < lengths[:, None, None, None])
        return found

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        rest = list(more)
        bias = rest.pop(0) if self.bias else None
        sinks = rest.pop(0) if self.sinks else None
        k, v = self._repeated(k), self._repeated(v)
        given, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
        if self.cast == "inputs":
            q, k = q.to(wide), k.to(wide)
        outer = self.scale
        if self.scaled == "query":
            q, outer = q * self.scale, 1.0
        elif self.scaled == "both":
            q, k, outer = q * math.sqrt(self.scale), k * math.sqrt(self.scale), 1.0
        scores = self._product(q, k)
        if self.cast == "scores":
            scores = scores.to(wide)
        if outer != 1.0:
            scores = scores / (1 / outer) if self.scaled == "divided" else scores * outer
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if bias is not None and self.first:
            scores = scores + bias
        scores = self._masked(scores)
        if bias is not None and not self.first:
            scores = scores + bias
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(self.batch, -1, self.q_len, -1)
            scores = torch.cat([scores, column.to(scores.dtype)], -1)
        if self.shifted:
            scores = scores - scores.amax(-1, keepdim=True).detach()
        weights = F.softmax(scores, -1, dtype=wide if self.cast == "softmax" else None).to(given)
        weights = weights if sinks is None else weights[..., :-1]
        if self.layout == "einsum":
            return torch.einsum("bhqk,bhkd->bqhd", weights, v)
        if self.layout == "flat":
            return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(q.shape)
        return weights @ v

    def _repeated(self, x: Tensor) -> Tensor:
        if self.group == 1:
            return x
        if self.repeat == "interleave":
            return x.repeat_interleave(self.group, 1)
        batch, heads, length, dim = x.shape
        return x[:, :, None].expand(batch, heads, self.group, length, dim).reshape(batch, -1, length, dim)

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        if self.layout == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", q, k)
        if self.layout == "flat":
            flat = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
            return flat.view(self.batch, self.heads, self.q_len, self.kv_len)
        return q @ k.mT

    def _masked(self, scores: Tensor) -> Tensor:
        if not self.mask:
            return scores
        seen = self.visible(scores.device)
        number = torch.finfo(scores.dtype).min if self.lowest else -math.inf
        if self.mask == "filled":
            return scores.masked_fill(~seen, number)
        if self.mask == "where":
            return torch.where(seen, scores, number)
        return scores + torch.where(seen, torch.zeros((), dtype=scores.dtype, device=seen.device), number)


def outcome(program: HandProgram) -> str:
    """Whether a program is replaced, or the reason why it is not replaced; its results are compared with double
    precision.
    """
    inputs = tensors(*program.shapes, dtype=program.dtype)
    with capture() as graphs:
        results = step(graphs.compile(program), inputs)
    assert_as_exact(program, inputs, results, strides=False, cancels=program.sinks)
    records = sites()
    assert len(records) == 1, records
    return "replaced" if records[0].status == "replaced" else f"{records[0].reason}: {records[0].detail}"


def run(seeds: range) -> tuple[Counter[str], list[str]]:
    """Outcomes of the programs of these seeds, and those that are computed wrongly or fail, with their errors."""
    found, wrong = Counter[str](), []
    for seed in seeds:
        program = HandProgram.drawn(seed)
        try:
            found[outcome(program)] += 1
        except Exception as error:
            wrong.append(f"seed {seed}: {program}: {type(error).__name__}: {error}")
    return found, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    outcomes, errors = run(range(arguments.seed, arguments.seed + arguments.programs))
    print(*outcomes.most_common(), *errors, sep="\n")
