"""Programs compiled without code: Inductor's passes and its partitioner run, and FX runs the graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule

graphs: list[GraphModule] = []
"""Those that came out, until somebody clears the list."""


def _run(part: GraphModule, _: object) -> Any:
    graphs.append(part)
    return make_boxed_func(part.forward)


def _infer(part: GraphModule, inputs: object) -> Any:
    return _run(compile_fx._recursive_joint_graph_passes(part), inputs)


def _backend(module: GraphModule, inputs: list[Any]) -> Any:
    compiler = aot_autograd(
        fw_compiler=_run, bw_compiler=_run, inference_compiler=_infer, partition_fn=compile_fx.partition_fn,
        decompositions=select_decomp_table(), keep_inference_input_mutations=True,
    )  # fmt: skip
    with V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
        return compiler(module, inputs)


def compiled(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    """The function; what was compiled before is forgotten."""
    torch._dynamo.reset()
    return torch.compile(function, backend=_backend, dynamic=dynamic)
