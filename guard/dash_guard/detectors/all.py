"""The list of a monitor's detectors, in the order in which they run."""

from __future__ import annotations

from .at_rest import AtRest
from .collective_checksums import CollectiveChecksums
from .cross_rank_recompute import CrossRankRecomputeDetector
from .data import SameData
from .detector import Detector
from .diagnosis import Diagnosis
from .foreign import Foreign
from .gathered_parameters import GatheredParameters
from .learned import Learned
from .liveness import Liveness
from .replicas import Replicas
from .same_rank_recompute import SameRankRecomputeDetector
from .slow import Slow

BITS: tuple[type[Detector], ...] = (AtRest, GatheredParameters, CollectiveChecksums, Learned, Replicas)
"""The detectors of bits; those that accuse a single rank come first, because they break ties."""

DETECTORS: tuple[type[Detector], ...] = (
    Liveness,
    Slow,
    Foreign,
    SameData,
    *BITS,
    SameRankRecomputeDetector,
    CrossRankRecomputeDetector,
    Diagnosis,
)
"""All detectors; the last one combines what the others have found."""
