"""Tracing of functions into graphs of the operators that Inductor lowers.  Imports Inductor's decompositions."""

import torch
from torch._decomp import decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["enable_python_dispatcher", "grid_sampler_2d", "make_fx", "select_decomp_table"]


def grid_sampler_2d(
    image: torch.Tensor, grid: torch.Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> torch.Tensor:
    """The operator by others, whose indices are not repeated for every channel."""
    return decompositions._grid_sampler_2d(
        image, grid, interpolation_mode, padding_mode, align_corners, _expand_grid=False
    )
