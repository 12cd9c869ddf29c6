"""Private names of torch and triton are spelled in `upstream/` alone: another version is a change of one room."""

from __future__ import annotations

import ast

import pytest

from dash_inductor.upstream import probe
from dash_inductor.upstream.seams import SEAMS

from ..support.distribution import ROOT
from .private_names import private_names

EXCEPTIONS = {
    ("_dash_inductor_autoload.py", "torch._ops"): "runs inside `import torch`, and imports nothing of the package",
    ("_dash_inductor_autoload.py", "torch._inductor.compile_fx"): "as `torch._ops`",
    ("_dash_inductor_autoload.py", "torch._dynamo.variables.higher_order_ops"): "as `torch._ops`",
    ("_dash_inductor_autoload.py", "torch._dynamo.variables.functions"): "as `torch._ops`",
    ("_dash_inductor_autoload.py", "torch._dynamo.symbolic_convert"): "as `torch._ops`",
    ("lowering/ahead.py", "torch._inductor.config.benchmark_fusion"): "an error names the setting for its reader",
}
UPSTREAM = (ROOT / "dash_inductor/upstream", ROOT / "guard/dash_guard/upstream")


def named_elsewhere() -> set[tuple[str, str]]:
    """File and private name, for every source of the package of both packages outside `upstream/`."""
    folders = ("dash_inductor", "kernels", "lowering", "guard/dash_guard")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {
        (str(path.relative_to(ROOT)), name)
        for path in [*files, *ROOT.glob("_dash_inductor_*.py"), ROOT / "guard/_dash_guard_autoload.py"]
        if not any(room in path.parents for room in UPSTREAM)
        for _, name in private_names(path.read_text(encoding="utf-8"))
    }


def test_private_names_are_upstream() -> None:
    found = named_elsewhere()
    assert sorted(found - EXCEPTIONS.keys()) == [], "name these in a module of dash_inductor/upstream"
    assert sorted(EXCEPTIONS.keys() - found) == [], "no exceptions any more"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._cuda_getDevice()", ["torch._C._cuda_getDevice"]),
        (
            "def f():\n    from torch._inductor import ir as x\n    x.View",
            ["torch._inductor.ir", "torch._inductor.ir.View"],
        ),
        ("import torch._dynamo.config as c", ["torch._dynamo.config"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("from torch import Tensor as T\nT._use_count", ["torch.Tensor._use_count"]),
        ("import importlib\nimportlib.import_module('torch._guards')", ["torch._guards"]),
        ("from triton.compiler import ASTSource", ["triton.compiler.ASTSource"]),
        ("import triton\ntriton.knobs.runtime", ["triton.knobs.runtime"]),
        ("from triton.language.core import _aggregate as a", ["triton.language.core._aggregate"]),
        ("import torch\ntorch.ops.aten._to_copy.default\ntorch.fx.Graph().__class__", []),
        ("import triton.language as tl\nfrom torch import nn\n'set torch._dynamo.config, or not'", []),
        ("import torchvision\ntorchvision._internally_replaced_utils", []),
        ("from .. import torch\nself._torch", []),
    ],
)
def test_the_reading_of_a_source(source: str, names: list[str]) -> None:
    assert [name for _, name in private_names(source)] == names


def test_every_seam_is_in_the_table() -> None:
    """A seam that the table lacks would be neither probed nor printed."""
    tree = ast.parse((UPSTREAM[0] / "seams.py").read_text(encoding="utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Seam"]
    assert len(made) == len(SEAMS) == len({(seam.module, seam.attribute) for seam in SEAMS})
    assert {seam.probed for seam in SEAMS} <= set(probe.TORCH)
