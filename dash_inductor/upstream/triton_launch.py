"""Details of Triton's own kernel launcher: the hooks of profilers, and the driver's codes of dtypes."""

from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

__all__ = ["TMA_DTYPE_DEVICE_TO_HOST", "knobs"]
