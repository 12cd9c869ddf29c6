"""Inductor's operators and pass that draw random seeds in graphs.  Imports Inductor."""

from torch._inductor.fx_passes.replace_random import fuse_seed_creation_pass
from torch._inductor.inductor_prims import seed

__all__ = ["fuse_seed_creation_pass", "seed"]
