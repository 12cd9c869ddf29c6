"""The gradient of a weight that embeds tokens and makes logits, on a GPU: values, bits and peak memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dash_inductor.config import REWRITES, config
from dash_inductor.records.records import all_records, clear_sites

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


class Language(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 768, padding_idx=3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = F.linear(torch.tanh(self.embed(tokens)), self.embed.weight)
        return F.cross_entropy(logits.float(), tokens.roll(1))


@pytest.mark.parametrize("vocabulary", [50257, 32000])
def test_gradient(vocabulary: int) -> None:
    torch.manual_seed(0)
    model = Language(vocabulary).cuda().bfloat16()
    tokens = (torch.rand(4096, device="cuda") ** 3 * vocabulary).long()
    found: dict[str, Tensor] = {}
    peaks = {}
    for how in ("off", "on"):
        torch._dynamo.reset()
        clear_sites()
        with config.patch(rewrites=set(REWRITES) - ({"tied_embeddings"} if how == "off" else set())):
            step = torch.compile(model, dynamic=False)
            for _ in range(3):
                model.zero_grad()
                torch.cuda.reset_peak_memory_stats()
                step(tokens).backward()
                assert model.embed.weight.grad is not None
                peaks[how] = torch.cuda.max_memory_allocated()
                gradient = model.embed.weight.grad.cpu()  # what stays on the GPU counts in the next peak
                assert how not in found or torch.equal(found[how], gradient)
                found[how] = gradient
        assert ("tied_embeddings" in {getattr(r, "rewrite", "") for r in all_records()}) is (how == "on")
        model.zero_grad()
        del step
    assert found["on"].stride() == found["off"].stride()
    assert (found["on"].float() - found["off"].float()).norm() <= 1e-2 * found["off"].float().norm()
    assert peaks["on"] <= 1.02 * peaks["off"]
