"""Three training steps on a GPU, whose results are printed as digests; `python -m tests.support.whole_step`.

Arguments: "deterministic" or "default", how timings are distorted ("", "inverse" or "random"), and "thread" to run
backwards on another thread.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

from .autotuned import row_sums


class Model(nn.Module):
    """Whatever is chosen by timing somewhere: pointwise kernels, reductions, products, scans, kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1009, 256)
        self.norm = nn.LayerNorm(256)
        self.qkv = nn.Linear(256, 768)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        self.head = nn.Linear(256, 1009, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        q, k, v = (t.unflatten(2, (4, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.mlp(self.norm(x))
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())
        noise = row_sums(x.detach().flatten(0, 1).float()) + x.detach().float().flatten().cumsum(0)[:: x.shape[2]]
        return loss + 1e-6 * (noise * x.float().flatten(0, 1).mean(1)).mean()


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().float().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def main(mode: str, distortion: str, *thread: str) -> None:
    torch.use_deterministic_algorithms(mode == "deterministic")
    config.test_configs.distort_benchmarking_result = distortion
    torch.manual_seed(0)
    model = Model().cuda().bfloat16()
    tokens = torch.randint(0, 1009, (8, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, found = torch.compile(model), []
    for _ in range(3):
        loss = step(tokens)
        if thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(loss.backward).result()
        else:
            loss.backward()
        found.append(digest([loss, *(p.grad for p in model.parameters() if p.grad is not None)]))
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps([*found, digest([*model.parameters()])]))


if __name__ == "__main__":
    main(*sys.argv[1:])
