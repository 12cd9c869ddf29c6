"""The list of a guard's checks, in the order in which they receive events."""

from __future__ import annotations

from .at_rest import AtRest
from .check import Check
from .collective_checksums import CollectiveChecksums
from .cross_rank_recompute import CrossRankRecompute
from .data import Data
from .facts import Facts
from .gathered_parameters import GatheredParameters
from .recomputed_update import RecomputedUpdate
from .replicas import Replicas
from .same_rank_recompute import SameRankRecompute
from .times import Times

BITS: tuple[type[Check], ...] = (AtRest, GatheredParameters, CollectiveChecksums, Replicas)
"""The checks of bits; state at rest is compared before anything else in a step."""

CHECKS: tuple[type[Check], ...] = (Facts, Times, Data, *BITS, RecomputedUpdate, SameRankRecompute, CrossRankRecompute)
"""All checks; with ``on_confirmed="raise"``, `checks.stop.Stop` runs after them."""
