"""Words that several judges use."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``; of many, the first ones."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def named(stage: str, name: str) -> str:
    """A tensor as findings name it, such as ``gradient blocks.0.attn.q.weight``."""
    return f"{stage} {name}"
