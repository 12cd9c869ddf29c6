"""Plant faults into short training runs under the guard, and count what it says of them.

    python -m tests.guard.campaign [--modes ddp fsdp hsdp tp replicate] [--kinds parameter ...] [--seeds 2] [--clean 2]

A name is a rank that a finding above a note accuses.  Precision: the share of names that are right; recall: the share
of faults whose rank is named by a finding of the expected kind.  In modes with two copies (`Kind.tie`), a pair of
suspects that has the rank counts as found, in a column of its own.
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

from ..support import planted
from ..support.planted import MODES, VARIANTS, Trial
from .kinds import KINDS


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


def _tensor(finding: dict[str, Any]) -> str:
    """With its stage: what is at rest says itself what it is."""
    return f"{finding['stage']} {finding['tensor']}".removeprefix("rest ")


def trials(modes: Iterable[str], kinds: Iterable[str], seeds: Iterable[int], clean: int) -> list[Trial]:
    """A trial of every kind in every mode for each seed, and clean ones, of all variants; ranks take turns."""
    found = [Trial(mode, seed=seed) for mode in modes for seed in range(clean)]
    if clean:
        found += [Trial(mode, variant=variant) for mode in modes for variant in VARIANTS[mode]]
    for mode in modes:
        for number, kind in enumerate(kinds):
            if mode in KINDS[kind].modes:
                found += [Trial(mode, kind, rank=(seed + number) % 4, seed=seed) for seed in seeds]
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """All results, a line for each mode and kind, and precision, recall and F1."""
    rows: dict[tuple[str, str], list[Score]] = collections.defaultdict(list)
    for result in results:
        rows[result["trial"]["mode"], result["trial"]["kind"]].append(score(result))
    lines = [f"{'mode':10} {'kind':18} {'n':>3} named tie step tensor false after"]
    for (mode, kind), scores in rows.items():
        named, tie, step, tensor, false = (
            sum(int(getattr(each, name)) for each in scores) for name in ("named", "tie", "step", "tensor", "false")
        )
        after = max((each.after for each in scores if each.named or each.tie), default=0)
        lines.append(f"{mode:10} {kind:18} {len(scores):3} {named:5} {tie:3} {step:4} {tensor:6} {false:5} {after:5}")
    faults = [each for (_, kind), scores in rows.items() if kind != "clean" for each in scores]
    every = [each for scores in rows.values() for each in scores]
    decided = [each for each in faults if not each.tie]
    right, false = sum(each.right for each in every), sum(each.false for each in every)
    precision = right / (right + false) if right + false else 1.0
    recall = sum(each.named for each in decided) / len(decided) if decided else 1.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    found = [each for each in faults if each.named or each.tie]
    ties = len(faults) - len(decided)
    steps, tensors = sum(each.step for each in found), sum(each.tensor for each in found)
    lines.append(f"precision {precision:.3f}  recall {recall:.3f}  F1 {f1:.3f}  of {len(faults)} faults, {ties} ties")
    lines.append(f"of {len(found)} that were found: step right {steps}, tensor right {tensors}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--clean", type=int, default=2, help="clean runs of each mode")
    parser.add_argument("--seconds", type=float, default=3000)
    parser.add_argument("--verbose", action="store_true", help="print every finding")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = trials(options.modes, options.kinds, range(options.seeds), options.clean)
        results = planted.run(chosen, Path(folder), seconds=options.seconds)
    if options.verbose:
        for result in results:
            print(json.dumps(result["trial"]), "off:", result["off"])
            for finding, when in zip(result["findings"], result["when"], strict=True):
                print("   ", when, finding["severity"], finding["ranks"], finding["sentence"])
    print(table(results))


if __name__ == "__main__":
    main()
