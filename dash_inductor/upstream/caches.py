"""The caches of Inductor and AOTAutograd: their folder, generated code, and key details.  Imports Inductor."""

from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir

__all__ = ["AOTAutogradCacheDetails", "PyCodeCache", "cache_dir"]
