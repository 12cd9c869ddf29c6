"""Do the forwards that a plan borrows give the same bits on every call, in every batch, and the right values?

    python -m benchmarks.forwards                  # everything, in random order, until the time is up
    python -m benchmarks.forwards --seconds 60 --only cudnn

Every forward of `dash_inductor.kernels.borrowed` that runs on CUDA is called `REPEATS` times in batches of three sizes,
the second half of the repeats beside matmuls on another stream.  Output and log-sum-exp must be bitwise equal every
time, and those of the first and the last batch element must be those of that element alone.  Once they are compared
with fp64.  Results: benchmarks/results/forwards.json, with every case that differed; exit status 1 if a case that the
planner would choose differed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from dash_inductor.kernels import borrowed
from dash_inductor.kernels.reference import visible
from torch import Tensor

from dash_inductor.errors import ArgumentError
from dash_inductor.model import Band, Call, Mask, Site
from dash_inductor.planning.forwards import choose

from . import common

REPEATS = 150
BATCHES = (1, 3, 60)
Q_LENGTHS = (1, 2, 3, 4, 5, 8, 16, 17, 32, 33, 48, 63, 64, 65, 96, 127, 128)
KV_LENGTHS = (1, 2, 3, 16, 64, 65, 127, 128, 129, 239, 256, 300, 512, 513, 1000, 1024, 2048, 4096)
LONG = (129, 200, 256, 300, 511, 600, 700, 1024, 2048)
HEADS = ((4, 4), (8, 2), (4, 1))
SHARE = {"cudnn": 8000, "flash": 6000, "efficient": 600}
FULL, CAUSAL = Band(), Band(0)
ALIGNED = (
    FULL, *(Band(lo, hi, "bottom_right") for lo, hi in (
        (0, None), (0, 99), (-50, 37), (-128, 128), (-50, None), (None, 20),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call, but for the batch: of a forward, by name, on (q heads, kv heads)."""

    forward: str
    dtype: str
    head_dim: int
    heads: tuple[int, int]
    q_len: int
    kv_len: int
    mask: Band
    scale: float

    def planned(self) -> bool:
        """Whether the planner chooses this forward here, on this GPU, for static or for dynamic lengths."""
        major, minor = torch.cuda.get_device_capability()
        static = Site(
            "cuda", self.dtype, 1, *self.heads, self.q_len, self.kv_len, self.head_dim, self.head_dim,
            Call(Mask(self.mask.resolve(self.q_len, self.kv_len)), self.scale),
        )  # fmt: skip
        dynamic = replace(
            static, q_len=None, kv_len=None, call=Call(Mask(self.mask), self.scale),
            least_q_len=min(self.q_len, 2), square=False,
            q_within_kv=self.q_len <= self.kv_len,
        )  # fmt: skip
        return any(choose(site, f"sm_{major}{minor}").name == self.forward for site in (static, dynamic))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"mask": str(self.mask), "heads": list(self.heads)}


def cases() -> list[Case]:
    """Cases in a random order that is always the same: of each forward as many as `SHARE` says, from a grid of all."""
    short = [*itertools.product(Q_LENGTHS, KV_LENGTHS)]
    long = [*itertools.product(LONG, (*LONG, 64, 4096))]
    order = random.Random(0)
    found: list[Case] = []

    def add(name: str, dtypes: tuple[str, ...], dims: tuple[int, ...], masks: tuple[Band, ...]) -> None:
        grid = [
            Case(name, dtype, dim, heads, q_len, kv_len, mask, dim**-0.5)
            for (q_len, kv_len), dim, heads, mask, dtype in itertools.product(short + long, dims, HEADS, masks, dtypes)
        ]
        chosen = order.sample(grid, SHARE[name])
        found.extend(chosen)
        found.extend(replace(case, scale=scale) for case in chosen[: SHARE[name] // 40] for scale in (-0.1, 0.0))

    add("cudnn", ("bfloat16", "float16"), (8, 32, 64, 80, 96, 128), (FULL, CAUSAL))
    add("flash", ("bfloat16", "float16"), (8, 64, 96, 128, 192, 256), ALIGNED)
    add("efficient", ("float32",), (16, 64, 128), (FULL, CAUSAL, Band(0, 99)))
    order.shuffle(found)
    return found


def tensors(case: Case, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""

    def tensor(heads: int, length: int, seed: int) -> Tensor:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        shape = (batch, length, heads, case.head_dim)
        return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, case.dtype)).transpose(1, 2)

    q_heads, kv_heads = case.heads
    return tensor(q_heads, case.q_len, 1), tensor(kv_heads, case.kv_len, 2), tensor(kv_heads, case.kv_len, 3)


class _Load:
    """Matmuls on another stream, made when they are first needed in a process."""

    stream: torch.cuda.Stream | None = None
    a: Tensor

    def add(self) -> None:
        if self.stream is None:
            self.stream = torch.cuda.Stream()
            self.a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        with torch.cuda.stream(self.stream):
            _ = self.a @ self.a


_load = _Load()


def row_of(case: Case) -> dict[str, Any] | None:
    """`check` as a row of the results; None if nothing went wrong, or the forward refuses what nobody plans."""
    try:
        faults = check(case)
    except (ArgumentError, RuntimeError) as error:
        faults = {"refused": str(error).splitlines()[0][:200]} if case.planned() else {}
    return case.as_dict() | {"planned": case.planned(), **faults} if faults else None


def check(case: Case) -> dict[str, Any]:
    """What went wrong, by kind; empty if nothing did."""
    run = borrowed._FORWARDS[case.forward]
    band = case.mask.resolve(case.q_len, case.kv_len)
    faults: dict[str, Any] = {}
    for batch in BATCHES:
        inputs = tensors(case, batch)

        def call(inputs: tuple[Tensor, ...] = inputs) -> tuple[Tensor, Tensor]:
            return run(*inputs, band, case.scale)

        first = call()
        if batch == BATCHES[0]:
            error = inaccuracy(case, band, inputs, first)
            if not error <= 0.02:
                faults["error"] = error
        differ = torch.zeros((), dtype=torch.int32, device="cuda")
        for i in range(REPEATS):
            if i >= REPEATS // 2 and i % 4 == 0:
                _load.add()
            unequal = [
                (a.view(_INTEGER[a.dtype]) != b.view(_INTEGER[b.dtype])).any()
                for a, b in zip(call(), first, strict=True)
            ]
            differ += unequal[0] | unequal[1]
        if differ.item():
            faults[f"repeats_of_batch_{batch}"] = int(differ.item())
        for element in {0, batch - 1} if batch > 1 else ():
            alone = run(*(t[element : element + 1].clone() for t in inputs), band, case.scale)
            if not all(torch.equal(a[0], b[element]) for a, b in zip(alone, first, strict=True)):
                faults.setdefault("not_as_alone", []).append([batch, element])
    return faults


_INTEGER = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def inaccuracy(case: Case, band: Band, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor]) -> float:
    """The larger of the relative errors of output and log-sum-exp, where a row sees keys; nan is an error."""
    q, k, v = (t.double() for t in inputs)
    group = case.heads[0] // case.heads[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    rows = [torch.arange(n, device="cuda") for n in (case.q_len, case.kv_len)]
    keep = visible(band, *rows)
    seen = keep.any(1)
    s = (q @ k.mT * case.scale).masked_fill(~keep, float("-inf"))
    exact = torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)
    out_error = (result[0].double() - exact[0]).norm() / exact[0].norm().clamp(min=1e-9)
    lse_error = (result[1].double() - exact[1])[..., seen].abs().max() if seen.any() else torch.zeros(())
    return float(torch.stack((out_error.cpu(), lse_error.cpu())).max())


def times() -> list[dict[str, Any]]:
    """The flash forward through its two entries, on windows, in two layouts; ms."""
    rows = []
    for dim, heads, kv_heads, length, window in (
        (128, 16, 16, 8192, 1024), (128, 16, 4, 8192, 4096), (256, 8, 4, 8192, None), (128, 16, 16, 1024, 256),
    ):  # fmt: skip
        for interleaved in (True, False):
            batch = 16384 // length
            q, k, v = (torch.randn(batch, length, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                       for h in (heads, kv_heads, kv_heads))  # fmt: skip
            if not interleaved:
                q, k, v = (t.contiguous() for t in (q, k, v))
            band = Band(0, None if window is None else window - 1)
            left = -1 if window is None else window - 1

            def dense(q: Tensor = q, k: Tensor = k, v: Tensor = v, n: int = length, left: int = left) -> object:
                return torch.ops.aten._flash_attention_forward(
                    *(x.transpose(1, 2) for x in (q, k, v)), None, None, n, n, 0.0, False, False, scale=0.1,
                    window_size_left=left, window_size_right=0,
                )  # fmt: skip

            def packed(q: Tensor = q, k: Tensor = k, v: Tensor = v, band: Band = band) -> object:
                return borrowed._flash(q, k, v, band, 0.1)

            dense_ms, packed_ms = common.time_ms(dense, packed)
            layout = "interleaved" if interleaved else "contiguous"
            rows.append({"dim": dim, "heads": f"{heads}/{kv_heads}", "length": length, "window": window or 0,
                         "layout": layout, "dense_ms": dense_ms, "packed_ms": packed_ms})  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this many seconds")
    parser.add_argument("--only", choices=sorted(SHARE), help="one forward")
    parser.add_argument("--processes", type=int, default=4, help="that call forwards at the same time")
    arguments = parser.parse_args()
    common.watchdog(arguments.seconds + 120)
    rows = times()
    common.table(rows)
    end = time.monotonic() + arguments.seconds
    todo = [case for case in cases() if arguments.only in (None, case.forward)]
    tried: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for case, row in zip(todo, pool.imap(row_of, todo, chunksize=4), strict=True):
            tried[case.forward] += 1
            wrong += [] if row is None else [row]
            if time.monotonic() > end:
                break
        pool.terminate()
    payload = {
        "conditions": common.conditions(), "repeats": REPEATS, "batches": list(BATCHES), "cases": sum(tried.values()),
        "tried": dict(tried), "times": rows, "differed": wrong,
    }  # fmt: skip
    common.write("forwards", payload)
    summary(wrong)
    bad = [row for row in wrong if row["planned"]]
    print(f"{sum(tried.values())} cases, {dict(tried)}; {len(wrong)} with faults, {len(bad)} of them planned")
    for row in bad[:20]:
        print(row)
    return 1 if bad else 0


def summary(wrong: list[dict[str, Any]]) -> None:
    """Faults by forward, kind and q_len."""
    counts: Counter[tuple[str, str, int, str]] = Counter()
    for row in wrong:
        for kind in row.keys() & {"error", "not_as_alone", "refused"} | {
            "repeats" for k in row if k.startswith("repeats_of")
        }:
            sign = "scale > 0" if row["scale"] > 0 else "scale <= 0"
            counts[row["forward"], kind, min(row["q_len"], 129), sign] += 1
    for key, count in sorted(counts.items()):
        print(*key, count)


if __name__ == "__main__":
    raise SystemExit(main())
