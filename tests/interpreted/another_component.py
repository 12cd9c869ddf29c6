"""Another component of masks, over a relation that there is: a double of components to come, to see what they need.

    python -m tests.interpreted.another_component CASE ...

runs cases of `scores` with it, and compares tables that kernels build with their definition.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from dash_inductor.model.components import COMPONENTS, Component, Operand
from dash_inductor.model.relations import BETWEEN


@dataclass(frozen=True)
class AtLeast(Component):
    """A component of a mask: query i of batch element b sees key j only if ``kv[b, j] >= q[b, i]``.

    Args:
        q, kv: integer tensors [batch, q_len] and [batch, kv_len], any strides, any values.
    """

    NAME = "at_least"
    RELATION = BETWEEN
    ROLES: ClassVar[Mapping[str, str]] = {"q": "least", "kv": "number"}

    q: Operand
    kv: Operand


@contextmanager
def installed() -> Iterator[None]:
    """The component is one of `COMPONENTS` inside the block."""
    COMPONENTS[AtLeast.NAME] = AtLeast
    try:
        yield
    finally:
        del COMPONENTS[AtLeast.NAME]


def same_tables_in_the_interpreter() -> None:
    import random

    import torch

    from dash_inductor.kernels.common import mask_tables
    from dash_inductor.kernels.common.mask_data import MaskData
    from dash_inductor.kernels.reference import tables as reference_tables
    from dash_inductor.model.mask import Mask

    from ..support.table_words import plan_of, same_tables

    rng = random.Random(0)
    mask_tables.ROW_BLOCK = 8
    for text in ("causal & at_least(0,1)", "segments(2,3) & keys(4) & at_least(0,1) & interval(5,none,none)"):
        mask = Mask.parse(text)
        vectors = [torch.randint(0, 9, (2, length)) for length in (30, 20, 30, 20, 20, 30)]
        vectors[4] = vectors[4] > 2
        data = MaskData.of(mask, vectors, (2, 4, 2, 30, 20))
        plan = plan_of(rng, mask.band, None, mask_tables.ROW_BLOCK)
        same_tables(mask_tables.build(data, plan), reference_tables.build(data, plan))
        print("RESULT tables", text, flush=True)


def main(cases: list[str]) -> None:
    from . import scores

    with installed():
        same_tables_in_the_interpreter()
        scores.main(cases)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    main(sys.argv[1:])
