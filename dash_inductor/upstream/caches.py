"""Where Inductor keeps what it has generated.  Imports Inductor."""

from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = ["PyCodeCache", "cache_dir"]
