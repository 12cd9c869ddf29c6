"""Padded products with NaN and infinities, in programs that compute with their results, beside PyTorch's products."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from ..support.fuzzed import Case, cases, check

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "log": torch.log,
    "inverse": lambda h: 1 / h,
    "relu": torch.relu,
    "bias": lambda h: h + torch.arange(h.shape[-1], dtype=h.dtype),
    "scaled": lambda h: h * torch.rand_like(h[..., :1]).round(),
    "softmax": lambda h: h.softmax(-1),
    "logits": lambda h: h.float().log_softmax(-1).to(h.dtype),
    "cut": lambda h: h[:-1],
    "flat": lambda h: h.reshape(1, -1, h.shape[-1]).expand(2, -1, -1).reshape(-1, h.shape[-1]),
    "masked": lambda h: h.masked_fill(h > 0.5, -torch.inf),
}


def make(r: random.Random) -> Case:
    m, k, n, last = (r.choice([7, 8, 16, 17, 24, 27, 33]) for _ in range(4))
    dtype = r.choice([torch.bfloat16, torch.float16, torch.float32])
    x, y, z = (torch.randn(*size) for size in ((m, k), (k, n), (n, last)))
    for tensor in (x, y, z):
        if r.random() < 0.3:
            flat = tensor.view(-1)
            flat[r.randrange(flat.numel())] = r.choice([torch.nan, torch.inf, -torch.inf])
    left, right = r.random() < 0.3, r.random() < 0.3  # operands that are transposed
    steps = [r.choice([*STEPS]) for _ in range(r.randrange(4))]
    ends = r.sample(["product", "hidden", "sum", "last", "rows"], r.choice([1, 1, 2]))
    kind = r.choice(["mm", "addmm", "bmm"])

    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        x, y = x.t().contiguous().t() if left else x, y.t().contiguous().t() if right else y
        if kind == "bmm":
            hidden = torch.bmm(x.expand(2, *x.shape), y.expand(2, *y.shape))[1]
        else:
            hidden = torch.addmm(y[0], x, y) if kind == "addmm" else x @ y
        product = hidden
        for step in steps:
            if step != "scaled":
                hidden = STEPS[step](hidden)
        found = {
            "product": lambda: product, "hidden": lambda: hidden * 1, "sum": lambda: hidden.sum(-1),
            "last": lambda: hidden @ z, "rows": lambda: product[: m // 2].exp(),
        }  # fmt: skip
        return tuple(found[end]() for end in ends)

    tensors = [t.to(dtype).requires_grad_(r.random() < 0.8) for t in (x, y, z)]
    return Case(f"{kind} {m} {k} {n} {last} {dtype} {steps} {ends} {left} {right}", program, tensors, r.random() < 0.2)


def test_products() -> None:
    check(make, "products", cases(20), least=0.5)
