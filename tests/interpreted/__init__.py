"""Programs that run kernels in Triton's interpreter, each in a process of its own, by `support.forks.interpreted`."""
