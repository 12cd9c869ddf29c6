"""The kernel before the main kernel of the forward: zeroes the counter from which CTAs take q tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def prepare(counter_ptr):
    """Zeroes counter_ptr, int32 [1]; launched as one program.

    The main kernel may start at once, because it waits for the end of this one before it reads the counter.
    """
    gdc_launch_dependents()
    tl.store(counter_ptr, 0)
