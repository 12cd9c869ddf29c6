"""Plant faults into short training runs under the guard, and count what it says of them.

    python -m guard.tests.campaign [--modes ddp fsdp ...] [--kinds parameter ...] [--checks all] [--seeds 1] [--clean 1]

``--checks defaults`` switches same-rank recomputes off, ``--checks off`` whatever finds a fault, so that it must go
unseen. Results can be kept (``--out FILE``), and tables made of several such files (``--of FILE ...``).

A name is a rank that a finding above a note accuses.  Precision: the share of names that are right.  Recall: the share
of faults whose rank is named alone, by a finding of the expected kind.  A fault of which only a pair of copies is
accused that has the rank (`Kind.tie`), or that nothing can show (`Kind.unseen`), is not named: it counts as missed.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .kinds import KINDS
from .support import planted
from .support.planted import MODES, VARIANTS, Trial


@dataclass(frozen=True)
class Score:
    """What was said of one trial.

    Attributes:
        named: a finding of the expected kind accuses the rank alone.
        tie: it accuses the rank among two, where no more can be known.
        step, tensor: whether that finding has the right ones; True if there is none to compare with.
        false: names of ranks that did nothing wrong, those of ties left out.
        right: names that are right.
        after: steps from the fault to that finding.
    """

    named: bool
    tie: bool
    step: bool
    tensor: bool
    false: int
    right: int
    after: int


def score(result: dict[str, Any]) -> Score:
    """The score of a result of `planted.run`."""
    trial = Trial(**result["trial"])
    kind = KINDS.get(trial.kind)
    may_tie = kind is not None and trial.mode in kind.tie
    accusing = [
        (finding, when)
        for finding, when in zip(result["findings"], result["when"], strict=True)
        if finding["severity"] != "note" and finding["ranks"]
    ]
    rank = None if kind is None else trial.rank
    ties = [pair for pair in accusing if may_tie and rank in pair[0]["ranks"] and len(pair[0]["ranks"]) == 2]
    names = [name for pair in accusing if pair not in ties for name in pair[0]["ranks"]]
    right = names.count(rank)
    expected = [pair for pair in accusing if kind is not None and pair[0]["kind"] in kind.named_by]
    alone = [pair for pair in expected if pair[0]["ranks"] == [rank]]
    first, when = (alone or [pair for pair in expected if pair in ties] or [({}, 0)])[0]
    wanted = trial.fact.get("tensor", "") if trial.fact else ""
    return Score(
        named=bool(alone),
        tie=not alone and bool(first),
        step=bool(first) and trial.step <= first["step"] <= trial.step + (kind.later if kind else 0),
        tensor=bool(first) and (not wanted or _tensor(first) == wanted),
        false=len(names) - right,
        right=right,
        after=when - trial.step,
    )


CHECKS = {
    "all": {"same_rank_recompute": 100, "cross_rank_recompute": 4},
    "defaults": {"same_rank_recompute": 0, "cross_rank_recompute": 4},
}
"""A trial has ten steps, so that cross-rank recomputes are more frequent than in a run with default settings."""

MICRO = ("parameter in step", "gradient", "update", "forward", "backward", "defect of forward")
"""Kinds that are also planted where DDP reduces every micro-batch."""


def settings_of(checks: str, kind: str) -> dict[str, int]:
    """Settings of a trial."""
    return {**CHECKS["all"], **dict.fromkeys(KINDS[kind].without, 0)} if checks == "off" else dict(CHECKS[checks])


def _tensor(finding: dict[str, Any]) -> str:
    """The tensor of a finding with its stage; a tensor at rest has its stage in its name."""
    return f"{finding['stage']} {finding['tensor']}".removeprefix("at rest ")


def trials(
    modes: Iterable[str], kinds: Sequence[str], seeds: Iterable[int], clean: int, checks: str = "all"
) -> list[Trial]:
    """A trial of every kind in every mode for each seed, and clean ones, of all variants; ranks take turns."""
    found: list[Trial] = []
    if checks != "off" and clean:
        settings = CHECKS[checks]
        found += [Trial(mode, seed=seed, settings=settings) for mode in modes for seed in range(clean)]
        found += [Trial(mode, variant=variant, settings=settings) for mode in modes for variant in VARIANTS[mode]]
    for mode in modes:
        for number, kind in enumerate(kinds):
            variants = ["", *(["micro-batches"] if mode == "ddp" and kind in MICRO else [])]
            if mode in KINDS[kind].modes and not (checks == "off" and mode in KINDS[kind].unseen):
                found += [
                    Trial(mode, kind, (seed + number) % 4, seed=seed, variant=v, settings=settings_of(checks, kind))
                    for seed in seeds
                    for v in variants
                ]
    return found


@dataclass(frozen=True)
class Total:
    """Counts of several trials, see `Score`."""

    faults: int
    named: int
    tie: int
    unseen: int
    step: int
    tensor: int
    right: int
    false: int

    @classmethod
    def of(cls, results: Iterable[dict[str, Any]]) -> Total:
        """Counts of results of `planted.run`."""
        kept = list(results)
        scores = [score(result) for result in kept]
        kinds = [KINDS.get(result["trial"]["kind"]) for result in kept]
        return cls(
            sum(kind is not None for kind in kinds),
            sum(each.named for each in scores),
            sum(each.tie for each in scores),
            sum(
                kind is not None and result["trial"]["mode"] in kind.unseen and not each.named
                for kind, result, each in zip(kinds, kept, scores, strict=True)
            ),
            sum(each.step and each.named for each in scores),
            sum(each.tensor and each.named for each in scores),
            sum(each.right for each in scores),
            sum(each.false for each in scores),
        )

    def __str__(self) -> str:
        precision = self.right / (self.right + self.false) if self.right + self.false else 1.0
        recall = self.named / self.faults if self.faults else 1.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        return (
            f"{self.faults:6} {self.named:5} {self.tie:4} {self.unseen:6} {self.step:4} {self.tensor:6} {self.false:5}"
            f"   {precision:.3f} {recall:.3f} {f1:.3f}"
        )


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each kind, for each mode, and for all of them."""
    head = f"{'':26} faults named tie unseen step tensor false       P     R    F1"
    rows: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for result in results:
        rows[result["trial"]["kind"]].append(result)
    for result in results:
        trial = result["trial"]
        micro = ", every micro-batch" if trial["variant"] == "micro-batches" and trial["kind"] != "clean" else ""
        rows[f"mode {trial['mode']}{micro}"].append(result)
    rows[f"all, of {sum(result['trial']['kind'] == 'clean' for result in results)} clean"] = list(results)
    return "\n".join([head, *(f"{name:26} {Total.of(row)}" for name, row in rows.items())])


def missed(results: Iterable[dict[str, Any]]) -> list[str]:
    """What was not as it should be, in words."""
    found = []
    for result in results:
        trial, of = result["trial"], score(result)
        kind = KINDS.get(trial["kind"])
        wrong = of.false > 0 or (bool(result["off"]) and not (kind is not None and kind.parts))
        if kind is not None and trial["mode"] not in kind.unseen:
            wrong |= not (of.named or of.tie) or not of.step or not of.tensor
        if wrong:
            found.append(f"{json.dumps(trial)}\n    {of}, off: {result['off']}")
            found += [
                f"    in step {when}: {f['kind']} {f['severity']} {f['ranks']} of step {f['step']}: {f['sentence']}"
                for f, when in zip(result["findings"], result["when"], strict=True)
            ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--checks", default="all", choices=[*CHECKS, "off"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--clean", type=int, default=1, help="clean runs of each mode")
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--out", type=Path, help="append results to a file")
    parser.add_argument("--of", nargs="+", type=Path, default=[], help="run nothing: make a table of such files")
    options = parser.parse_args()
    results = [json.loads(line) for path in options.of for line in path.read_text().splitlines()]
    if not options.of:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        chosen = trials(options.modes, options.kinds, seeds, options.clean, options.checks)
        with tempfile.TemporaryDirectory() as folder:
            results = planted.run(chosen, Path(folder), seconds=options.seconds)
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    print("\n".join(missed(results)))
    print(table(results))


if __name__ == "__main__":
    main()
