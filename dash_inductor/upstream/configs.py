"""The settings modules of Dynamo, AOTAutograd and Inductor, each with a context manager `patch`.  Imports Dynamo."""

from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor

__all__ = ["dynamo", "functorch", "inductor"]
