"""Inductor's caches are never stale, and without dash_inductor's help they stay the caches of plain PyTorch.

Every run is a fresh process over one cache folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dash_inductor.config import config
from dash_inductor.install import cache_key
from dash_inductor.operators import attention as ops

from ..support.processes import run_python

PROGRAM = """
import hashlib, json, sys
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

def run(flag):
    torch.use_deterministic_algorithms(flag)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    f = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    f(q, k, v).square().sum().backward()
    fx, aot = counters["inductor"], counters["aot_autograd"]
    hits, misses = fx["fxgraph_cache_hit"], fx["fxgraph_cache_miss"]  # of the forward and of the backward graph
    found = {(2, 0, 1, 0): "hit", (0, 2, 0, 1): "miss"}.get(
        (hits, misses, aot["autograd_cache_hit"], aot["autograd_cache_miss"])
    )
    bits = b"".join(x.grad.numpy().tobytes() for x in (q, k, v))
    return found or [dict(fx), dict(aot)], hashlib.sha256(bits).hexdigest()

if "disable" in sys.argv:
    import dash_inductor
result = {"off": run(False)} if "off" in sys.argv else {}
if "disable" in sys.argv:
    dash_inductor.disable()
result["on"] = run(True)
dash = sys.modules.get("dash_inductor")
result["sites"] = [site.status for site in dash.sites()] if dash else None
result["origins"] = [graph.origin for graph in dash.graphs()] if dash else None
if "setting" in sys.argv:
    dash.config.schedule = "ascending"
    result["setting"] = run(True)
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_hits_and_misses(cache: Path, copied_package: Path) -> None:
    def run(*args: str, path: Path | None = None, **env: str) -> dict[str, list[object]]:
        result = run_python(PROGRAM, *args, path=path, TORCHINDUCTOR_CACHE_DIR=cache, **env)
        answer: dict[str, list[object]] = json.loads(result.stdout.splitlines()[-1])
        return answer

    ours = {"DASH_INDUCTOR_CPU": "reference", "DASH_INDUCTOR_STRICT": "1"}
    base = run("off", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (base["off"][0], base["on"][0], base["sites"]) == ("miss", "miss", None)

    first = run(**ours)
    assert (first["on"][0], first["sites"]) == ("miss", ["replaced"])
    again = run("setting", **ours)
    assert (again["on"], again["setting"][0]) == (["hit", first["on"][1]], "miss")
    assert (first["origins"], again["origins"]) == (["compiled"], ["AOTAutogradCache"])
    assert again["sites"] == ["replaced"]  # from the entry: in this process no pass has run

    kernel = copied_package / "dash_inductor/kernels/reference/backward.py"
    kernel.write_text(kernel.read_text() + "\n# changed\n")
    source = run(path=copied_package, **ours)
    assert (source["on"][0], source["sites"]) == ("miss", ["replaced"])

    # Installed, but off: by the flag, then by the switch.  Same entries, same bits as without dash_inductor.
    off = run("off", "disable", **ours)
    assert (off["off"], off["on"], off["origins"]) == (["hit", base["off"][1]], ["hit", base["on"][1]], [])
    assert first["on"][1] != base["on"][1]


def graph(op: torch._ops.OpOverload) -> torch.fx.GraphModule:
    result = torch.fx.Graph()
    x = result.placeholder("x")
    result.output(result.call_function(op, (x,)))
    return torch.fx.GraphModule({}, result)


def test_our_operators_are_found_in_nested_graphs() -> None:
    plain, ours = graph(torch.ops.aten.relu.default), graph(ops.attention_backward)
    assert not cache_key.has_our_ops(None)
    assert not cache_key.has_our_ops(plain)
    assert cache_key.has_our_ops(ours)
    plain.add_module("nested", ours)
    assert cache_key.has_our_ops(plain)


@pytest.mark.parametrize("flag", [False, True])
def test_the_final_graph_alone_decides_about_its_key(flag: bool) -> None:
    """The backward may be compiled after the flag was changed, and in a thread that knows no `disabled()` block."""
    import torch._inductor.compile_fx  # installs
    from torch._inductor.codecache import FxGraphHashDetails

    torch.use_deterministic_algorithms(flag)
    plain = FxGraphHashDetails(graph(torch.ops.aten.relu.default), [], {}, [])
    ours = FxGraphHashDetails(graph(ops.attention_backward), [], {}, [])
    assert "dash_inductor" not in vars(plain)
    assert vars(ours)["dash_inductor"] == cache_key.entry()
    assert vars(ours).keys() - vars(plain).keys() == {"dash_inductor"}


def test_graphs_on_a_gpu_have_our_entry_where_we_choose_blocks() -> None:
    import torch._inductor.compile_fx  # installs
    from torch._inductor.codecache import FxGraphHashDetails

    for flag in (False, True):
        torch.use_deterministic_algorithms(flag)
        for device in ("cpu", "cuda"):
            plain = graph(torch.ops.aten.relu.default)
            for node in plain.graph.nodes:
                with FakeTensorMode():
                    node.meta["val"] = torch.empty(1, device=device)
            details = vars(FxGraphHashDetails(plain, [], {}, []))
            assert ("dash_inductor" in details) is (flag and device == "cuda")


def test_entry_covers_settings() -> None:
    before = cache_key.entry()
    with config.patch(schedule="shift"):
        assert cache_key.entry() != before
    assert cache_key.entry() == before


def test_digest_covers_every_source_under_its_installed_name(copied_package: Path) -> None:
    names = sorted(cache_key._sources())
    assert {"config.py", "lowering/__init__.py", "kernels/__init__.py", "model/attention_spec.py"} <= set(names)
    program = (
        "from dash_inductor.install import cache_key as k; print(sorted(k._sources()), k.sources_digest(), sep='\\n')"
    )
    found, before = run_python(program, path=copied_package).stdout.splitlines()
    assert found == str(names)
    file = copied_package / "dash_inductor/model/attention_spec.py"
    file.write_text(file.read_text() + "\n")
    assert run_python(program, path=copied_package).stdout.splitlines()[1] != before
