"""Programs that train, with and without the guard: `KINDS` has all of them, by name."""

from . import ddp, hooks, modules, optimizers, recomputes, shards
from .compared import TRACES, run
from .training import KINDS, STEPS

__all__ = ["KINDS", "STEPS", "TRACES", "ddp", "hooks", "modules", "optimizers", "recomputes", "run", "shards"]
