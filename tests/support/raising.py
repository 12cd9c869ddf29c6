"""Programs of operators that raise under deterministic algorithms on CUDA, and what becomes of them: run on its own.

    python -m tests.support.raising

Graphs are traced on a CUDA device that does not exist.  One line of JSON: what becomes of each of `PROGRAMS`, as
`OUTCOMES` has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Make = Callable[..., Tensor]
"""Gives a tensor of a shape that wants a gradient."""


def _indices(count: int, rows: int) -> Tensor:
    return torch.arange(count) % rows


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
    "antialias": lambda make: F.interpolate(make(2, 64, 32, 32), size=(20, 20), mode="bilinear", antialias=True),
    "torch.nn.ReflectionPad1d": lambda make: F.pad(make(2, 64, 100), (3, 3), mode="reflect"),
    "torch.nn.ReflectionPad2d": lambda make: F.pad(make(2, 64, 32, 32), (3, 3, 2, 2), mode="reflect"),
    "torch.nn.ReflectionPad3d": lambda make: F.pad(make(2, 4, 16, 16, 16), (3, 3, 2, 2, 1, 1), mode="reflect"),
    "torch.nn.ReplicationPad2d": lambda make: F.pad(make(2, 64, 32, 32), (3, 3, 2, 2), mode="replicate"),
    "torch.nn.NLLLoss": lambda make: F.cross_entropy(make(4, 19, 64, 64), _indices(16384, 19).reshape(4, 64, 64)),
    "torch.nn.EmbeddingBag": _bag,
    "torch.Tensor.put_": _put,
    "grid_sample": lambda make: F.grid_sample(make(2, 8, 32, 32), make(2, 40, 40, 2), align_corners=False),
    "grid_sample 3d": lambda make: F.grid_sample(make(2, 4, 8, 8, 8), make(2, 9, 9, 9, 3), align_corners=False),
    "torch.cumsum": lambda make: make(64, 6400).cumsum(1),
    "torch.gather": lambda make: make(64, 6400).gather(1, _indices(6400, 64).reshape(64, 100)),
    "unfold": lambda make: F.unfold(make(2, 64, 32, 32), 3),
}
RAISE = {
    "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward", "aten::_embedding_bag_backward",
    "aten::_upsample_bilinear2d_aa_backward", "aten::adaptive_max_pool2d_backward", "aten::avg_pool3d_backward",
    "aten::fractional_max_pool2d_backward", "aten::fractional_max_pool3d_backward", "aten::grid_sampler_2d_backward",
    "aten::grid_sampler_3d_backward", "aten::max_pool3d_with_indices_backward", "aten::put", "aten::cumsum",
    "aten::index_put", "aten::_unsafe_index_put", "aten::scatter_add", "aten::nll_loss2d_forward",
    "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward",
    "aten::replication_pad2d_backward", "aten::upsample_bilinear2d_backward",
}  # fmt: skip
"""Operators whose kernels raise, or are slow, under deterministic algorithms, unless Inductor has one of its own."""
OURS, FAST = "replaced", "fast"
OUTCOMES: dict[str, str] = {
    "torch.nn.AvgPool3d": FAST,
    **dict.fromkeys((name for name in PROGRAMS if "Adaptive" in name or "MaxPool" in name), OURS),
    **dict.fromkeys(("linear", "bilinear", "bicubic", "trilinear", "torch.nn.ReplicationPad2d"), OURS),
    "antialias": "aten::_upsample_bilinear2d_aa_backward",
    **dict.fromkeys((name for name in PROGRAMS if "Reflection" in name), FAST),
    "torch.nn.NLLLoss": FAST,
    "torch.nn.EmbeddingBag": "aten::_embedding_bag_backward",
    "torch.Tensor.put_": OURS,
    "grid_sample": OURS,
    "grid_sample 3d": "aten::grid_sampler_3d_backward",
    "torch.cumsum": "aten::cumsum",
    "torch.gather": OURS,
    "unfold": OURS,
}
"""What becomes of a program: ours takes the place of what raises, Inductor has a kernel, or what is left."""
NOT_TRACED = {
    "torch.nn.MaxUnpool1d", "torch.nn.MaxUnpool2d", "torch.nn.MaxUnpool3d", "torch.nn.FractionalMaxPool3d",
    "torch.nn.CTCLoss", "torch.histc", "torch.bincount", "torch.kthvalue", "torch.median", "torch.Tensor.resize_",
    "torch.nn.functional.grid_sample", "torch.nn.functional.interpolate", "torch.Tensor.scatter_reduce", "RuntimeError",
}  # fmt: skip
"""Names of PyTorch's list without a program of their own: these raise as ever, or have one under another name."""


def main() -> None:
    from . import fakecuda, mockgpu

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

    from .graphs import partition_with

    left: set[str] = set()

    class Look:
        def apply(self, graph: torch.fx.Graph) -> int:
            for node in graph.nodes:
                if op_name(node) in RAISE and (node.target in fallbacks or node.target not in lowerings):
                    left.add(op_name(node))
            return 0

    compat.joint_passes().append(Look())
    torch._inductor.config.joint_graph_constant_folding = False  # it computes with real tensors
    torch.use_deterministic_algorithms(True)
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

            program(make)

            def run(*given: Tensor, program: Callable[[Make], Tensor] = program) -> Tensor:
                tensors = iter(given)
                return program(lambda *shape: next(tensors)).sin()

            torch.compile(run, backend=partition_with(lambda graph: None))(*leaves)
        replaced = [record.status == "replaced" for record in dash_inductor.all_records()]
        found[name] = ", ".join(sorted(left)) or (OURS if replaced and all(replaced) else FAST)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
