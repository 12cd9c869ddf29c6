"""The settings of PyTorch's compilers; `patch` of each changes settings inside a block.  Imports Dynamo."""

from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor

__all__ = ["dynamo", "functorch", "inductor"]
