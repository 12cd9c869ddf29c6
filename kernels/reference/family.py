"""The reference family, in plain ATen on the CPU: the calls that it covers, and its tiles."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.plan import Tiles
from ...model.relations import RELATIONS
from ...model.site import Site
from ..family import SCORES, Candidate, Family

TILES = Tiles.parse("64x64w1s1")


class Reference(Family):
    """The family of the reference executor, which runs plans in plain ATen on the CPU."""

    name = "reference"
    head_dims = "all"
    reads = RELATIONS
    scores = SCORES
    device = "cpu"

    def runs_on(self, arch: str, bits: int) -> bool:
        return arch == "cpu"

    def has_head_dims(self, head_dim: int, value_dim: int) -> bool:
        return True

    def candidates(self, site: Site, arch: str) -> Sequence[Candidate]:
        return Candidate(TILES, TILES), Candidate(TILES, matmul=0.3, reduce=0.4, handover=0.1)

    def forward_tiles(self, site: Site, arch: str, backward: str) -> Tiles | None:
        return TILES if arch == "cpu" else None


FAMILY = Reference()
