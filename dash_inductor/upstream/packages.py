"""The entries of Dynamo's precompile cache.  Imports Dynamo."""

from torch._dynamo.package import SystemInfo

__all__ = ["SystemInfo"]
