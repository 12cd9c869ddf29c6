"""PyTorch's fake tensors, which have shapes, dtypes and devices but no values, and the mode that makes them."""

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
    unset_fake_temporarily,
)

__all__ = [
    "DataDependentOutputException",
    "FakeTensor",
    "FakeTensorMode",
    "detect_fake_mode",
    "is_fake",
    "unset_fake_temporarily",
]
