"""Programs of operators that raise under deterministic algorithms on CUDA, and what becomes of them: run on its own.

    python -m tests.passes.ops.raising

Graphs are traced on a CUDA device that does not exist.  One line of JSON: what becomes of each of `PROGRAMS`, as
`OUTCOMES` has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Make = Callable[..., Tensor]
"""Gives a tensor of a shape that wants a gradient."""


def _indices(count: int, rows: int) -> Tensor:
    return torch.arange(count, device="cuda") % rows


def _bag(make: Make) -> Tensor:
    return F.embedding_bag(_indices(4096, 1000).reshape(512, 8), make(1000, 64), mode="max")


def _put(make: Make) -> Tensor:
    return make(64, 64).put(_indices(5000, 4096), make(5000), accumulate=True)


PROGRAMS: dict[str, Callable[[Make], Tensor]] = {
    "torch.nn.AvgPool3d": lambda make: F.avg_pool3d(make(2, 3, 8, 8, 8), 3, 2),
    "torch.nn.AdaptiveAvgPool2d": lambda make: F.adaptive_avg_pool2d(make(2, 64, 32, 32), 7),
    "torch.nn.AdaptiveAvgPool3d": lambda make: F.adaptive_avg_pool3d(make(2, 4, 16, 16, 16), 7),
    "torch.nn.MaxPool3d": lambda make: F.max_pool3d(make(2, 4, 16, 16, 16), 3, 2),
    "torch.nn.AdaptiveMaxPool2d": lambda make: F.adaptive_max_pool2d(make(2, 64, 32, 32), 7),
    "torch.nn.FractionalMaxPool2d": lambda make: F.fractional_max_pool2d(make(2, 64, 32, 32), 3, output_size=8),
    "linear": lambda make: F.interpolate(make(2, 64, 100), scale_factor=2.0, mode="linear"),
    "bilinear": lambda make: F.interpolate(make(2, 64, 32, 32), scale_factor=2.0, mode="bilinear"),
    "bicubic": lambda make: F.interpolate(make(2, 16, 32, 32), size=(16, 16), mode="bicubic"),
    "trilinear": lambda make: F.interpolate(make(2, 4, 16, 16, 16), size=(8, 8, 8), mode="trilinear"),
    "bilinear, antialias": lambda make: F.interpolate(make(2, 64, 32, 32), size=20, mode="bilinear", antialias=True),
    "bicubic, antialias": lambda make: F.interpolate(make(2, 64, 32, 32), size=20, mode="bicubic", antialias=True),
    "torch.nn.ReflectionPad1d": lambda make: F.pad(make(2, 64, 100), (3, 3), mode="reflect"),
    "torch.nn.ReflectionPad2d": lambda make: F.pad(make(2, 64, 32, 32), (3, 3, 2, 2), mode="reflect"),
    "torch.nn.ReflectionPad3d": lambda make: F.pad(make(2, 4, 16, 16, 16), (3, 3, 2, 2, 1, 1), mode="reflect"),
    "torch.nn.ReplicationPad2d": lambda make: F.pad(make(2, 64, 32, 32), (3, 3, 2, 2), mode="replicate"),
    "torch.nn.ReplicationPad3d": lambda make: F.pad(make(2, 4, 20, 20, 20), (1, 1, 2, 2, 1, 1), mode="replicate"),
    "torch.nn.NLLLoss": lambda make: F.cross_entropy(make(4, 19, 64, 64), _indices(16384, 19).reshape(4, 64, 64)),
    "torch.nn.EmbeddingBag": _bag,
    "torch.nn.MaxUnpool1d": lambda make: F.max_unpool1d(make(2, 4, 8), _indices(64, 16).reshape(2, 4, 8), 2),
    "torch.nn.MaxUnpool2d": lambda make: F.max_unpool2d(make(2, 4, 8, 8), _indices(512, 256).reshape(2, 4, 8, 8), 2),
    "torch.nn.MaxUnpool3d": lambda make: F.max_unpool3d(make(8, 4, 4, 4), _indices(512, 512).reshape(8, 4, 4, 4), 2),
    "torch.histc": lambda make: make(1000).histc(10, 0, 1),
    "torch.median": lambda make: make(100, 100).median(1).values,
    "torch.kthvalue": lambda make: make(100, 100).kthvalue(7, 1).values,
    "torch.Tensor.scatter_reduce": lambda make: make(1000, 8).scatter_reduce(
        0, _indices(8000, 1000).reshape(1000, 8), make(1000, 8), "prod"
    ),
    "torch.Tensor.put_": _put,
    "grid_sample": lambda make: F.grid_sample(make(2, 8, 32, 32), make(2, 40, 40, 2), align_corners=False),
    "grid_sample 3d": lambda make: F.grid_sample(make(2, 4, 8, 8, 8), make(2, 9, 9, 9, 3), align_corners=False),
    "torch.cumsum": lambda make: make(64, 6400).cumsum(1),
    "torch.gather": lambda make: make(64, 6400).gather(1, _indices(6400, 64).reshape(64, 100)),
    "unfold": lambda make: F.unfold(make(2, 64, 32, 32), 3),
}
RAISE = {
    "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward", "aten::_embedding_bag_backward",
    "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward", "aten::scatter_reduce",
    "aten::adaptive_max_pool2d_backward", "aten::avg_pool3d_backward",
    "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward", "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward", "aten::max_pool3d_with_indices_backward", "aten::put",
    "aten::index_put", "aten::_unsafe_index_put", "aten::scatter_add", "aten::nll_loss2d_forward",
    "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward",
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward", "aten::replication_pad3d_backward", "aten::upsample_bilinear2d_backward",
}  # fmt: skip
"""Operators whose kernels raise, or are slow, under deterministic algorithms, unless Inductor has one of its own."""
FAST = "Inductor's kernel"
OUTSIDE = "PyTorch's operator, outside of the graph"
RAISES = " does not have a deterministic implementation"
RANGES, SUMS, SORTED = "`index_ranges`", "`index_sums`", "`sorted_values`"
STORED = "PyTorch's scatter by an index, which sorts"
OUTCOMES: dict[str, str] = {
    "torch.nn.AvgPool3d": FAST,
    "torch.nn.AdaptiveAvgPool2d": RANGES,
    "torch.nn.AdaptiveAvgPool3d": RANGES,
    "torch.nn.MaxPool3d": SUMS,
    "torch.nn.AdaptiveMaxPool2d": SUMS,
    "torch.nn.FractionalMaxPool2d": SUMS,
    "linear": RANGES,
    "bilinear": RANGES,
    "bicubic": RANGES,
    "trilinear": RANGES,
    "bilinear, antialias": RANGES,
    "bicubic, antialias": RANGES,
    "torch.nn.ReflectionPad1d": FAST,
    "torch.nn.ReflectionPad2d": FAST,
    "torch.nn.ReflectionPad3d": FAST,
    "torch.nn.ReplicationPad2d": RANGES,
    "torch.nn.ReplicationPad3d": RANGES,
    "torch.nn.NLLLoss": FAST,
    "torch.nn.EmbeddingBag": SUMS,
    "torch.nn.MaxUnpool1d": STORED,
    "torch.nn.MaxUnpool2d": STORED,
    "torch.nn.MaxUnpool3d": STORED,
    "torch.histc": SORTED,
    "torch.median": f"{SORTED}, `small_scatter`",
    "torch.kthvalue": f"{SORTED}, `small_scatter`",
    "torch.Tensor.scatter_reduce": "error: `aten::scatter_reduce`",
    "torch.Tensor.put_": SUMS,
    "grid_sample": f"`grid_sample`, {SUMS}",
    "grid_sample 3d": f"`grid_sample`, {SUMS}",
    "torch.cumsum": FAST,
    "torch.gather": SUMS,
    "unfold": SUMS,
}
"""What becomes of a program: the rewrites whose records it has, a kernel of Inductor, or the error that is raised."""
BEFORE_2_13 = dict.fromkeys(("torch.nn.ReplicationPad2d", "torch.nn.ReplicationPad3d"), OUTSIDE)
"""What becomes of some in earlier versions of torch, where Dynamo does not trace them."""
NOT_TRACED = {
    "torch.nn.FractionalMaxPool3d", "torch.nn.CTCLoss", "torch.bincount", "torch.Tensor.resize_",
    "torch.nn.functional.grid_sample", "torch.nn.functional.interpolate", "RuntimeError",
}  # fmt: skip
"""Names of PyTorch's list without a program of their own: the device that does not exist lacks them, or they are no
part of graphs, or they have programs under other names."""


def table() -> str:
    """The rows of the page about the rest of a step."""
    return "\n".join(f"| {name.removeprefix('torch.')} | {outcome} |" for name, outcome in OUTCOMES.items())


def main() -> None:
    from ...support import fakecuda, mockgpu

    mockgpu.install_driver()
    fakecuda.install()
    import torch._inductor.compile_fx
    import torch._inductor.config
    from torch._inductor.lowering import fallbacks, lowerings
    from torch._subclasses.fake_tensor import FakeTensorMode

    mockgpu.install_torch()
    import dash_inductor
    from dash_inductor.graph.nodes import op_name
    from dash_inductor.upstream import compat

    from ...support.graphs import partition_with

    left: set[str] = set()

    class Look:
        def apply(self, graph: torch.fx.Graph) -> int:
            for node in graph.nodes:
                if op_name(node) in ("aten::index_put", "aten::_unsafe_index_put") and node.args[3:] != (True,):
                    left.add(STORED)
                has_kernel = node.target in lowerings and node.target not in fallbacks and "prod" not in node.args
                if op_name(node) in RAISE and not has_kernel:
                    left.add(f"error: `{op_name(node)}`")
            return 0

    compat.joint_passes().append(Look())
    torch._inductor.config.joint_graph_constant_folding = False  # it computes with real tensors
    found = {}
    for name, program in PROGRAMS.items():
        torch._dynamo.reset()
        left.clear()
        dash_inductor.clear_sites()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
            leaves: list[Tensor] = []

            def make(*shape: int, leaves: list[Tensor] = leaves) -> Tensor:
                leaves.append(torch.empty(*shape, requires_grad=True))
                return leaves[-1]

            torch.use_deterministic_algorithms(False)
            program(make)
            torch.use_deterministic_algorithms(True)

            def run(*given: Tensor, program: Callable[[Make], Tensor] = program) -> Tensor:
                tensors = iter(given)
                return program(lambda *shape: next(tensors)).sin()

            try:
                torch.compile(run, backend=partition_with(lambda graph: None), fullgraph=True)(*leaves)
            except torch._dynamo.exc.Unsupported as error:
                if RAISES not in str(error):
                    found[name] = OUTSIDE
                    continue
                raise
            except RuntimeError as error:
                if RAISES not in str(error):
                    raise
                operator = re.split(r': |"', str(error).split(RAISES)[0])[-1]
                found[name] = f"error: `{operator}`"
                continue
        records = dash_inductor.all_records()
        assert all(record.status == "replaced" for record in records), records
        rewrites = dict.fromkeys(f"`{record.rewrite}`" for record in records)
        found[name] = ", ".join(sorted(left) or rewrites) or FAST
    print(json.dumps(found))


if __name__ == "__main__":
    main()
