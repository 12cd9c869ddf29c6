"""Before the main kernel: the counter from which its CTAs draw their tiles is set to zero."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def prepare(counter_ptr):
    """One program.  counter_ptr: int32 [1].  The main kernel may begin at once, because it waits before it draws."""
    gdc_launch_dependents()
    tl.store(counter_ptr, 0)
