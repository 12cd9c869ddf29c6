"""Graphs and code that were saved: operators exist in a process that compiles nothing, and stale code is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import dash_inductor
from dash_inductor.operators.all import MODULES

from ..support.processes import run_python

# Attention whose source is found again in another process, as the precompile cache wants it.
MODULE = """
import torch
import torch.nn.functional as F

def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

def inputs():
    torch.manual_seed(0)
    return [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]

def digest(tensors):
    import hashlib
    return hashlib.sha256(b"".join(t.grad.numpy().tobytes() for t in tensors)).hexdigest()

torch.use_deterministic_algorithms(True)
"""
ON = {"DASH_INDUCTOR_CPU": "reference", "DASH_INDUCTOR_STRICT": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "saved_attention.py").write_text(MODULE)
    return folder


def run(program: str, folder: Path, *args: str, **env: str | Path) -> Any:
    """The JSON that a program prints last."""
    result = run_python(program, *args, path=folder, TORCHINDUCTOR_CACHE_DIR=folder / "cache", **env)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("env", [{}, {"DASH_INDUCTOR": "0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}], ids=str)
def test_operators_are_defined_when_they_are_asked_for(env: dict[str, str]) -> None:
    run_python(
        f"""
        import sys
        {"import dash_inductor" if "TORCH_DEVICE_BACKEND_AUTOLOAD" in env else ""}
        import torch
        assert "dash_inductor.operators.attention" not in sys.modules and "torch._inductor" not in sys.modules
        assert not hasattr(torch.ops.dash_inductor, "no_such_operator")
        operator = torch.ops.dash_inductor.attention_backward.default
        assert str(operator) == "dash_inductor.attention_backward.default"
        assert operator is sys.modules["dash_inductor.operators.attention"].attention_backward
        q = torch.randn(1, 2, 16, 8)
        plan = "reference/two_pass/dkdv=64x64w1s1/dq=64x64w1s1/head_chunk=4/forward=reference/fwd=64x64w1s1"
        out, lse = torch.ops.dash_inductor.attention_forward(q, q, q, [], "causal/scale=0.5/orders=0123", plan, "")
        expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
        torch.testing.assert_close(out, expected)
        """,
        **env,
    )


def test_all_modules_that_define_operators_are_listed() -> None:
    folder = Path(dash_inductor.__file__).parent
    defining = {path for path in folder.rglob("*.py") if 'library.Library("dash_inductor"' in path.read_text()}
    assert {Path(str(module.__file__)) for module in MODULES} == defining


@pytest.mark.parametrize("first", ["torch.ops.dash_inductor.attention_backward", "import torch._inductor.compile_fx"])
def test_inductor_lowers_the_operators_of_a_saved_graph(first: str) -> None:
    """Whichever comes first, the operators or Inductor."""
    run_python(
        f"""
        import torch
        {first}
        operator = torch.ops.dash_inductor.attention_backward.default
        import torch._inductor.compile_fx
        assert operator in torch._inductor.lowering.lowerings
        """
    )


def test_inductors_repro_files_run_in_a_fresh_process(folder: Path, tmp_path: Path) -> None:
    program = """
        import os, sys
        os.chdir(sys.argv[1])
        import torch
        import saved_attention as saved
        torch.compile(saved.attend)(*saved.inputs()).sum().backward()
    """
    run_python(
        program, str(tmp_path), path=folder, TORCH_COMPILE_DEBUG="1", TORCH_TRACE=tmp_path / "trace",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1", **ON,
    )  # fmt: skip
    (backward,) = (f for f in tmp_path.rglob("fx_graph_runnable.py") if "backward" in f.parent.name)
    forward = tmp_path / "forward.py"
    forward.write_text(traced_repros(tmp_path / "trace")[0])
    for name, file in (("forward", forward), ("backward", backward)):
        assert f"torch.ops.dash_inductor.attention_{name}.default(" in file.read_text()
    run_python(f"import runpy; [runpy.run_path(p, run_name='__main__') for p in {[str(forward), str(backward)]!r}]")


def traced_repros(folder: Path) -> list[str]:
    """The payloads `fx_graph_runnable` of a structured trace, oldest first."""
    (log,) = (f for f in folder.iterdir() if "fx_graph_runnable" in f.read_text())
    parts = re.split(r"^[A-Z]\d{4} .*?\] ", log.read_text(), flags=re.MULTILINE)
    found = [part.split("\n", 1) for part in parts if '"name": "fx_graph_runnable"' in part.split("\n", 1)[0]]
    return [re.sub(r"^\t", "", payload, flags=re.MULTILINE) for _, payload in found]


def test_a_function_compiled_ahead_of_time_runs_in_a_fresh_process(folder: Path) -> None:
    file = folder / "function.bin"
    save = """
        import json, sys
        import torch
        import saved_attention as saved
        q = saved.inputs()
        if hasattr(torch._dynamo.config, "enable_aot_compile"):
            torch._dynamo.config.enable_aot_compile = True  # torch 2.11 does not have it on by default
        function = torch.compile(saved.attend, fullgraph=True).aot_compile((tuple(q), {}))
        function(*q).sum().backward()
        function.save_compiled_function(sys.argv[1])
        import dash_inductor
        print(json.dumps([saved.digest(q), [graph.as_dict() for graph in dash_inductor.graphs()]]))
    """
    load = """
        import json, sys
        import torch
        import saved_attention as saved
        with open(sys.argv[1], "rb") as file:
            function = torch.compiler.load_compiled_function(file)
        q = saved.inputs()
        function(*q).sum().backward()
        operators = "dash_inductor.operators.attention" in sys.modules
        import torch._inductor.compile_fx  # without it nothing of dash_inductor but the operators is there
        with open(sys.argv[1], "rb") as file:
            torch.compiler.load_compiled_function(file)
        import dash_inductor
        print(json.dumps([saved.digest(q), operators, [graph.as_dict() for graph in dash_inductor.graphs()]]))
    """
    bits, (graph,) = run(save, folder, str(file), **ON)
    assert [site["status"] for site in graph["sites"]] == ["replaced"]
    assert run(load, folder, str(file)) == [bits, True, [{**graph, "origin": "precompile"}]]


PRECOMPILE = """
import json, sys
import torch
import saved_attention as saved
from torch._C._dynamo.eval_frame import _reset_precompile_entries
from torch._dynamo.precompile_context import PrecompileContext
from torch._dynamo.utils import counters

def run(deterministic=True):
    # What became of the function, as in a fresh process: "hit" means that nothing was compiled.
    torch._dynamo.reset()
    _reset_precompile_entries(saved.attend.__code__)
    PrecompileContext.clear()
    counters.clear()
    torch.use_deterministic_algorithms(deterministic)
    q = saved.inputs()
    torch.compile(saved.attend)(*q).sum().backward()
    torch.compiler.save_cache_artifacts()
    dash = sys.modules.get("dash_inductor")
    records.append([(graph.origin, len(graph.sites)) for graph in dash.graphs()] if dash else None)
    return ["compiled" if counters["stats"]["unique_graphs"] else "hit", saved.digest(q)]

records = []
result = {"first": run()}
if "changes" in sys.argv:
    import dash_inductor
    from dash_inductor.install import cache_key as _cache_key
    result["again"] = run()
    result["flag off"] = run(False)  # adds to the entry, which must not forget under which state the rest was compiled
    with dash_inductor.config.patch(schedule="ascending"):
        result["setting"] = run()
    plain = _cache_key.sources_digest
    _cache_key.sources_digest = lambda: "of the next version"
    result["upgrade"] = run()
    _cache_key.sources_digest = plain
    with dash_inductor.disabled():
        result["disabled"] = run()
    result["enabled"] = run()
result["records"] = records
print(json.dumps(result))
"""


def test_the_precompile_cache_refuses_code_of_another_state(folder: Path) -> None:
    env: dict[str, str] = {"TORCH_CACHING_PRECOMPILE": "1"}
    first = run(PRECOMPILE, folder, "changes", **env, **ON)
    ours = first["first"][1]
    assert first.pop("records")[:2] == [[["compiled", 1]], [["compiled", 1], ["precompile", 1]]]
    assert {name: what for name, (what, _) in first.items()} == {
        "first": "compiled", "again": "hit", "flag off": "compiled", "setting": "compiled", "upgrade": "compiled",
        "disabled": "compiled", "enabled": "compiled",
    }  # fmt: skip
    assert {name for name, (_, bits) in first.items() if bits != ours} == {"disabled", "flag off"}
    other_process = run(PRECOMPILE, folder, **env, **ON)
    assert (other_process["first"], other_process["records"]) == (["hit", ours], [[["precompile", 1]]])
    off = run(PRECOMPILE, folder, DASH_INDUCTOR="0", **env)["first"]
    assert off[0] == "compiled"
    assert off[1] != ours
    assert run(PRECOMPILE, folder, **env, **ON)["first"] == ["compiled", ours]
