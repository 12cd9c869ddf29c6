"""The campaign of cross-rank recomputes and of same-rank recomputes: how many planted faults are named, and how many
healthy ranks are.

``python -m guard.tests.recompute_campaign [SEED [NAME]]`` prints a line for each mode and kind of fault, and what was
missed. With four processes on two cores it takes about five minutes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.distribution import ROOT
from tests.support.processes import HANGS

from .support.recomputed import LEAVES

WORLD = 4
MODES = ("ddp", "fsdp", "hsdp")
BITS = (0, 3, 12, 22, 25, 30)


def persistent(seed: int) -> Iterator[dict[str, Any]]:
    """36 defects that strike at every execution from step 2 on, and a clean run of each mode."""
    draw = random.Random(seed)
    for mode in MODES:
        yield {"mode": mode, "noisy": mode == "ddp", "steps": 3}
        for kind in ("forward", "backward"):
            for bit in BITS:
                module = draw.choice(LEAVES[:-1] if kind == "backward" else LEAVES)
                yield {
                    "mode": mode, "kind": kind, "rank": draw.randrange(WORLD), "module": module, "bit": bit,
                    "element": draw.randrange(1 << 20), "steps": 2, "loss": draw.random() < 0.5,
                }  # fmt: skip


def pairs(seed: int) -> Iterator[dict[str, Any]]:
    """36 defects among two replicas, which cannot vote."""
    draw = random.Random(seed + 2)
    for mode in ("ddp", "fsdp"):
        yield {"mode": mode, "steps": 3}
        for kind in ("forward", "backward", "local"):
            for bit in BITS:
                yield {
                    "mode": mode, "kind": kind, "rank": draw.randrange(2), "module": draw.choice(LEAVES[:-1]),
                    "bit": bit, "element": draw.randrange(1 << 20), "steps": 2,
                }  # fmt: skip


def transient(seed: int) -> Iterator[dict[str, Any]]:
    """Faults that strike once in the real step, in every mode, with every step run again on the same rank and no
    cross-rank recompute.
    """
    draw = random.Random(seed + 1)
    for mode in (*MODES, "tp", "replicate"):
        yield {"mode": mode, "steps": 3, "every": 0, "same_rank_recompute": 100, "noisy": mode == "ddp"}
        for kind in ("forward", "backward", "local"):
            for bit in (0, 12, 25):
                yield {
                    "mode": mode, "kind": kind, "rank": draw.randrange(WORLD),
                    "module": draw.choice(LEAVES[:-1]), "bit": bit, "element": draw.randrange(1 << 20),
                    "once": True, "steps": 3, "every": 0, "same_rank_recompute": 100,
                    "micro_batches": 2 - (mode == "ddp"),
                }  # fmt: skip


def run(trials: Sequence[dict[str, Any]], world: int = WORLD) -> list[dict[str, Any]]:
    """The results of trials, see `support.recomputed`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "guard.tests.support.recomputed", str(world), folder]
        result = subprocess.run(
            command, cwd=ROOT, input=json.dumps(trials), capture_output=True, text=True, check=False, timeout=HANGS
        )
    assert result.returncode == 0, result.stderr
    results = [json.loads(line) for line in result.stdout.splitlines()]
    for trial, here in ((each["trial"], each["struck"]) for each in results):
        strikes = trial["kind"] not in ("clean", "unseeded", "set")
        assert here == [strikes and rank == trial["rank"] for rank in range(world)], f"{trial} was not planted"
    return results


def scored(result: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether the fault of a trial was found, whether its rank alone was named, and whether its step was."""
    findings = [
        finding for finding in result["findings"] if finding["kind"] in ("cross_rank_recompute", "same_rank_recompute")
    ]
    if not findings:
        return False, False, False
    named = {rank for finding in findings for rank in finding["ranks"]}
    trial = result["trial"]
    return True, named == {trial["rank"]}, findings[0]["step"] == trial["first"]


CAMPAIGNS = {
    "cross_rank_recompute": (WORLD, persistent),
    "two_replicas": (2, pairs),
    "same_rank_recompute": (WORLD, transient),
}


def main(seed: int, names: Sequence[str]) -> None:
    rows: dict[tuple[str, str], list[int]] = {}
    for name in names:
        world, trials = CAMPAIGNS[name]
        for result in run(list(trials(seed)), world):
            trial = result["trial"]
            row = rows.setdefault((name, f"{trial['mode']} {trial['kind']}"), [0] * 6)
            found, right, step = scored(result)
            row[0] += 1
            row[1] += found
            row[2] += found and right and trial["kind"] != "clean"
            row[3] += found and step
            row[4] += any(finding["severity"] == "confirmed" for finding in result["findings"])
            row[5] += result["unchanged"]
            if (found or result["findings"]) if trial["kind"] == "clean" else not right:
                print("MISS", trial, [finding["sentence"] for finding in result["findings"]], result["coverage"])
    print(f"{'check, mode and kind':32} planted  found  right rank  right step  confirmed  bits unchanged")
    for (name, kind), row in rows.items():
        print(f"{name + ', ' + kind:32} {row[0]:7} {row[1]:6} {row[2]:11} {row[3]:11} {row[4]:8} {row[5]:15}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0, sys.argv[2:] or list(CAMPAIGNS))
