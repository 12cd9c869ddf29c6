"""Padded products on a GPU: values, layouts, bits, and peak memory beside unpadded ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor.config import REWRITES, config
from dash_inductor.records.records import all_records, clear_sites

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

VOCABULARY, WIDTH, TOKENS = 50257, 768, 4096


class Head(nn.Module):
    """An embedding and logits with one weight, as GPT-2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = F.linear(torch.tanh(self.embed(tokens)), self.embed.weight)
        return F.cross_entropy(logits.float(), tokens.roll(1))


def step(run: Callable[[Tensor], Tensor], model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def peak(run: Callable[[Tensor], Tensor], model: nn.Module, tokens: Tensor) -> int:
    """Bytes that a step holds at most beside what was there: weights, workspaces, and results that a test keeps."""
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(tokens).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dynamic", [False, True])
def test_logits(dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Head().cuda().bfloat16()
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    torch._dynamo.reset()
    with config.patch(rewrites=set(REWRITES) - {"pad_mm"}):
        plain = torch.compile(model, dynamic=dynamic)
        expected, most = step(plain, model, tokens), peak(plain, model, tokens)
    torch._dynamo.reset()
    clear_sites()
    padded = torch.compile(model, dynamic=dynamic)
    found = step(padded, model, tokens)
    assert {r.detail for r in all_records() if r.rewrite == "pad_mm"} == {
        f"padded: {name} from {VOCABULARY} to 50304" for name in "mkn"
    }, list(map(str, all_records()))
    for a, b in zip(expected, found, strict=True):
        assert a.stride() == b.stride()
        assert (a.float() - b.float()).norm() <= 2e-2 * a.float().norm()
    for _ in range(20):
        assert all(map(torch.equal, found, step(padded, model, tokens)))
    # The peak is where logits and their gradient are there, and no copy of the weight is.  The rest are columns of
    # zeros and what the allocator rounds up, for which peaks have a percent.
    assert peak(padded, model, tokens) <= 1.01 * most
