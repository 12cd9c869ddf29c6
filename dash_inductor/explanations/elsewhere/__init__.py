"""Compiles a function for a GPU that this machine does not have, up to Inductor's joint-graph passes.

Note [A device that is not there]
Nothing here needs a GPU, a CUDA build of PyTorch or a compiler.  The program is compiled with fake tensors, which have
shapes but no values, in these steps:

1. `moving`: arguments, parameters and buffers become fake tensors on ``cuda``.
2. `device`: ``torch.cuda`` answers as for that GPU, so that Dynamo traces what the program does there: ``x.device``,
   ``.to("cuda")`` and autocast are correct, and a tensor that stays on the CPU does so there, too.
3. `sdpa`: `scaled_dot_product_attention` chooses its implementation by PyTorch's rules for that GPU.
4. `stand_in`: without CUDA, PyTorch's autograd cannot run backwards of CUDA tensors.  So Dynamo's graph is moved to the
   device ``cpu:64`` before AOTAutograd traces it, and the joint graph back to ``cuda`` before the first pass.  For
   Python, autograd and operators, ``cpu:64`` is a device different from ``cpu``, as ``cuda`` is.  It appears in no
   message.

A program that cannot be traced this way raises `Untraceable` or another error: the outcome is then reported as unknown,
never taken from another device.
"""

from __future__ import annotations

from ...errors import DashError


class Untraceable(DashError):
    """Something cannot be traced for a GPU that is not present; the message says what, as the end of a sentence."""
