"""Runs before the main kernel: zeroes the counter from which its CTAs take tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def prepare(counter_ptr):
    """Zeroes counter_ptr, int32 [1]; one program.  The main kernel may start at once, because it waits before it draws."""
    gdc_launch_dependents()
    tl.store(counter_ptr, 0)
