"""SHA-256 of the Hopper kernel's gradients of fixed problems, to compare processes and machines.

python -m tests.support.hopper_bits prints them; with --write they become tests/golden/hopper_bits.json, which
other machines with the same version of Triton are held against.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import triton
from torch import Tensor

from dash_inductor.model import Band

from . import hopper_calls
from .attention import Attention
from .calls import backward_spec
from .hopper import plan_of
from .repeats import digest

GOLDEN = Path(__file__).parent.parent / "golden" / "hopper_bits.json"

# head dims of q and of v, mask, schedule, dtype, group, q_len, kv_len; tile schedules over 64 q tiles of 64 rows are
# bent
CASES = [
    (64, 64, Band(0), "spt", torch.bfloat16, 1, 1024, 1024),
    (64, 64, Band(), "ascending", torch.float16, 4, 1000, 1500),
    (96, 96, Band(0, 99), "descending", torch.bfloat16, 1, 777, 777),
    (128, 128, Band(), "ascending", torch.bfloat16, 1, 1024, 1024),
    (128, 128, Band(0), "bent_fold", torch.bfloat16, 4, 4200, 4200),
    (128, 128, Band(), "shift", torch.bfloat16, 1, 1024, 1024),
    (128, 128, Band(0), "symmetric_shift", torch.bfloat16, 1, 1024, 1024),
    (128, 128, Band(-40, 40), "spt", torch.float16, 8, 1023, 1023),
    (192, 128, Band(0), "spt", torch.bfloat16, 1, 1000, 1000),
    (256, 256, Band(0, None, "bottom_right"), "spt", torch.bfloat16, 2, 700, 1000),
]


def _numbers(*shape: int, seed: int) -> Tensor:
    """Multiples of 2**-8 below 2 by integer arithmetic alone, the same on every machine."""
    count = torch.Size(shape).numel()
    x = torch.arange(count, device="cuda", dtype=torch.int64) + seed * 7919
    for _ in range(3):
        x = (x * 1103515245 + 12345) & 0x7FFFFFFF
        x = x ^ (x >> 13)
    return ((x & 0x3FF) - 512).view(shape).float() / 256


def problem(index: int) -> tuple[Attention, Tensor, Tensor]:
    """(inputs, out, log-sum-exp) of a case.  The last two belong to no forward: the bits do not ask."""
    head_dim, value_dim, mask, _, dtype, group, q_len, kv_len = CASES[index]
    batch, kv_heads = 2, 2

    def tensor(length: int, heads: int, dim: int, seed: int) -> Tensor:
        return _numbers(batch, length, heads, dim, seed=10 * index + seed).to(dtype).transpose(1, 2)

    q, k = tensor(q_len, kv_heads * group, head_dim, 1), tensor(kv_len, kv_heads, head_dim, 2)
    v, do = tensor(kv_len, kv_heads, value_dim, 3), tensor(q_len, kv_heads * group, value_dim, 4)
    out = tensor(q_len, kv_heads * group, value_dim, 5)
    lse = _numbers(batch, kv_heads * group, q_len, seed=10 * index + 6) + 8.0
    return Attention(q, k, v, do, mask, 0.0625), out, lse


def compute() -> dict[str, str]:
    """Digests by case."""
    digests = {}
    for index, (*facts, dtype, group, q_len, kv_len) in enumerate(CASES):
        p, out, lse = problem(index)
        schedule = CASES[index][3]
        plan = plan_of(p, schedule)
        gradients = hopper_calls.backward(p.do, p.q, p.k, p.v, out, lse, backward_spec(p.mask, p.scale), plan)
        assert all(g.isfinite().all() and g.any() for g in gradients)
        name = " ".join(map(str, (*facts, str(dtype).removeprefix("torch."), f"group {group}", f"{q_len}x{kv_len}")))
        digests[name] = digest(gradients)
    return digests


def golden() -> dict[str, str] | None:
    """The committed digests of this version of Triton, None if there are none."""
    if not GOLDEN.exists():
        return None
    versions: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return versions.get(triton.__version__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="commit them to the golden file")
    options = parser.parse_args()
    digests = compute()
    if options.write:
        versions = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
        versions[triton.__version__] = digests
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(digests))


if __name__ == "__main__":
    main()
