"""Ranks in sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from .judge import Job

_LISTED = 8


def listed_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1 and 4``, ``ranks 1, 4 and 7``; of more than eight the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:_LISTED]]
    if len(ranks) > _LISTED:
        return f"ranks {', '.join(shown)} and {len(ranks) - _LISTED} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def named(ranks: Sequence[int], job: Job) -> str:
    """As `listed_ranks`, with host and GPU of a single rank, where they are known: ``rank 17 (node2, GPU 1)``."""
    if len(ranks) != 1:
        return listed_ranks(ranks)
    places = ", ".join(filter(None, (job.hosts.get(ranks[0]), job.gpus.get(ranks[0]))))
    return f"rank {ranks[0]} ({places})" if places else f"rank {ranks[0]}"
