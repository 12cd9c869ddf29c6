"""One rank in sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

from .judge import Job
from .wording import ranks as listed


def named(ranks: Sequence[int], job: Job) -> str:
    """Ranks, and host and GPU of a single one, where they are known: ``rank 17 (node2, GPU 1)``."""
    if len(ranks) != 1:
        return listed(ranks)
    places = ", ".join(filter(None, (job.hosts.get(ranks[0]), job.gpus.get(ranks[0]))))
    return f"rank {ranks[0]} ({places})" if places else f"rank {ranks[0]}"
