"""`SystemInfo`, which entries of Dynamo's precompile cache store and check when they are loaded.  Imports Dynamo."""

from torch._dynamo.package import SystemInfo

__all__ = ["SystemInfo"]
