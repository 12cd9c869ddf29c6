"""Compiles a function for a GPU that this machine does not have, as far as Inductor's joint-graph passes.

Note [A device that is not there]
Nothing here needs a GPU, a CUDA build of PyTorch or a compiler.  The compiled program has fake tensors, with shapes and
without values, and goes through these steps:

1. `moving`: arguments, parameters and buffers become fake tensors on ``cuda``.
2. `device`: ``torch.cuda`` answers as that GPU would, so that Dynamo traces what the program does there: ``x.device``,
   ``.to("cuda")`` and autocast come out right, and a tensor that stays on the CPU is one there too.
3. `sdpa`: `scaled_dot_product_attention` chooses its implementation by PyTorch's rules for that GPU.
4. `stand_in`: PyTorch's autograd runs no backward of CUDA tensors where there is no CUDA.  So the graph of Dynamo is
   moved to the device ``cpu:1`` before AOTAutograd traces it, and the joint graph back to ``cuda`` before the first
   pass over it.  To Python, autograd and the operators this device is another one than ``cpu``, as ``cuda`` is.

A program that cannot be traced so raises `Untraceable` or another error: the answer is that nothing is known, never the
answer for another device.
"""

from __future__ import annotations

from ...errors import DashError


class Untraceable(DashError):
    """Something cannot be traced for a GPU that is not there; the message says what, as the end of a sentence."""
