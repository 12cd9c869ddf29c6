"""Finds which ranks agree on tensors that must be equal on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..fingerprints.sizes import LANES


def find(ranks: list[int], labels: Sequence[tuple[str, str]], rows: list[list[int]]) -> dict[str, Any] | None:
    """The first tensor in which ranks differ; None if all agree.

    Args:
        ranks: global ranks.
        labels: phase and name of every tensor.
        rows: the lanes of all tensors, one row for each rank.

    Returns:
        A dictionary. phase, tensor: what differs; groups: ranks that agree, the largest group first; minority: the
        ranks outside of the largest group, empty if there are two of that size; differing: how many tensors differ.
    """
    if all(row == rows[0] for row in rows):
        return None
    by_tensor = [[tuple(row[start : start + LANES]) for row in rows] for start in range(0, len(rows[0]), LANES)]
    differing = [number for number, values in enumerate(by_tensor) if len(set(values)) > 1]
    first = differing[0]
    by_value: dict[tuple[int, ...], list[int]] = {}
    for rank, value in zip(ranks, by_tensor[first], strict=True):
        by_value.setdefault(value, []).append(rank)
    groups = sorted(by_value.values(), key=lambda group: (-len(group), group))
    tie = len(groups[0]) == len(groups[1])
    return {
        "phase": labels[first][0],
        "tensor": labels[first][1],
        "groups": groups,
        "minority": [] if tie else sorted(rank for group in groups[1:] for rank in group),
        "differing": len(differing),
    }


def sentence(finding: dict[str, Any]) -> str:
    """A finding of `find` in words, such as ``rank 3 differs from ranks 0, 1, 2 in gradient head.weight``."""
    what = f"{finding['phase']} {finding['tensor']}"
    others = finding["differing"] - 1
    more = f" (and {others} more tensor{'s' * (others > 1)})" if others else ""
    if finding["minority"]:
        differ = "differs" if len(finding["minority"]) == 1 else "differ"
        return f"{_ranks(finding['minority'])} {differ} from {_ranks(finding['groups'][0])} in {what}{more}"
    between = " and ".join(_ranks(group) for group in finding["groups"])
    return f"{between} differ from each other in {what}{more}; no majority says which is right"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
