"""The dump: what it writes for a compiled graph, that nothing is overwritten, and that it never breaks a compile."""

from __future__ import annotations

import functools
import html
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import dash_inductor
from dash_inductor.config import config
from dash_inductor.explanations.dump import files, graph_page, kernels, writer
from dash_inductor.explanations.dump.dot import dot
from dash_inductor.explanations.dump.snapshot import Item, Snapshot
from dash_inductor.model.reasons import Reason

from ..support.graphs import capture, causal_bias, efficient, joint_graph, rewritten, tensors
from ..support.processes import HANGS

pytestmark = pytest.mark.usefixtures("deterministic")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def masked(query: Tensor, attention_mask: Tensor) -> Tensor:
    """Causal attention over the keys that the mask shows."""
    length = query.shape[2]
    visible = attention_mask[:, None, None, :].bool() & torch.ones(length, length).tril().bool()
    return F.scaled_dot_product_attention(query, query, query, attn_mask=visible)


def causal(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def passes(function: Callable[..., Tensor], *arguments: Tensor, **settings: Any) -> Tensor:
    """Compile as far as the joint-graph passes, and run."""
    with capture(**settings) as graphs:
        return graphs.compile(function)(*arguments)


def query(length: int = 64) -> Tensor:
    (tensor,) = tensors((2, 2, length, 32))
    return tensor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config.dump = str(tmp_path / "dump")
    return tmp_path / "dump"


def graph_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/*/index.html"))


def test_files_of_a_graph(folder: Path) -> None:
    passes(masked, query(), torch.ones(2, 64))
    (graph,) = graph_folders(folder)
    names = {path.name for path in graph.iterdir()}
    assert names == {
        "index.html", "joint_before.py", "joint_after.py", "joint.diff", "sites.json", "site_1_before.dot",
        "site_1_after.dot", "site_1_schedule.txt", "site_1_schedule.json",
    }  # fmt: skip
    before, after = ((graph / f"joint_{when}.py").read_text() for when in ("before", "after"))
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in before
    assert "torch.ops.dash_inductor" not in before
    assert "torch.ops.dash_inductor.attention_backward" in after
    compile(before, "joint_before.py", "exec")  # it is Python
    assert "torch.ops.dash_inductor.attention_backward" in (graph / "joint.diff").read_text()
    (record,) = dash_inductor.sites()
    (site,) = json.loads((graph / "sites.json").read_text())["graphs"][0]["sites"]
    assert site["name"] == record.name
    assert site["decision"]["plan"] == str(record.plan)
    around = [(graph / f"site_1_{when}.dot").read_text() for when in ("before", "after")]
    assert ['label="flash_attention_for_cpu_backward\\n' in text for text in around] == [True, False]
    assert ['label="dash_inductor::attention_backward\\n' in text for text in around] == [False, True]
    page = (graph / "index.html").read_text()
    assert all(html.escape(text) in page for text in (*around, (graph / "site_1_schedule.txt").read_text()))
    assert json.loads((graph / "site_1_schedule.json").read_text())["traceEvents"]
    assert all(f'href="{name}"' in page for name in names - {"index.html"})
    for above, below in ((folder, graph.parent), (graph.parent, graph)):
        assert f'href="{below.name}/index.html"' in (above / "index.html").read_text()
    assert not list(folder.rglob(".*"))  # nothing unfinished is left


def test_nothing_is_written_without_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    passes(causal, query())
    assert list(tmp_path.iterdir()) == []


def test_a_fallback_site_is_shown_once_and_has_advice(folder: Path) -> None:
    passes(causal, query(), cpu="off")
    (graph,) = graph_folders(folder)
    assert (graph / "joint.diff").read_text() == ""
    page = (graph / "index.html").read_text()
    assert page.count("digraph") == 1
    assert html.escape(Reason.CPU_OFF.advice.split(".")[0]) in page


def test_equal_sites_share_a_card_and_every_site_has_its_files(folder: Path) -> None:
    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.scaled_dot_product_attention(x, x, x)

    passes(layers, query())
    (graph,) = graph_folders(folder)
    around = sorted(path.name for path in graph.glob("site_*_before.dot"))
    assert around == [f"site_{number}_before.dot" for number in (1, 2, 3)]
    assert len({(graph / name).read_text() for name in around}) == 3
    assert {path.name for path in graph.glob("site_*_schedule.txt")} == {"site_1_schedule.txt", "site_3_schedule.txt"}
    page = (graph / "index.html").read_text()
    assert page.count("<section class=card>") == 2
    assert all(f'href="{name}"' in page for name in around)
    assert all(page.count(f'id="site-{number}"') == 1 for number in (1, 2, 3))


class Masked(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return masked(x, torch.ones(2, 64))


def test_the_operators_of_a_site_are_found(folder: Path) -> None:
    """Their text of the site has the name of its module, too, and with a bias it is not their last argument."""
    passes(torch.nn.Sequential(Masked()), query())
    (graph,) = graph_folders(folder)
    text = (graph / "site_1_after.dot").read_text()
    centres = re.findall(r'label="([\w:]+).*penwidth', text)
    assert centres == ["dash_inductor::attention_forward", "dash_inductor::attention_backward"]
    dash_inductor.clear_sites()
    with_bias, record = rewritten(joint_graph(efficient, bias=lambda: causal_bias(128), bias_grad=True))
    items = Snapshot.of(with_bias)
    labels = [items.items[name].label for name in items.of_site(record.name)]
    assert labels == ["dash_inductor::attention_forward", "dash_inductor::attention_backward"]


def test_strict_leaves_a_dump_of_what_it_refused(folder: Path) -> None:
    with pytest.raises(Exception, match="dtype"):
        passes(causal, tensors((1, 2, 64, 32), dtype=torch.float64)[0], strict=True)
    (graph,) = graph_folders(folder)
    assert '"dtype"' in (graph / "sites.json").read_text()


def test_compiles_do_not_overwrite_one_another(folder: Path) -> None:
    """Every capture begins anew, so that all of these have the same compile id."""
    for length in (64, 128, 192):
        passes(causal, query(length))
    assert [graph.name for graph in graph_folders(folder)] == ["0_0", "0_0-2", "0_0-3"]
    shapes = [
        json.loads((g / "sites.json").read_text())["graphs"][0]["sites"][0]["shape"] for g in graph_folders(folder)
    ]
    assert shapes == [f"2x2x{length}x32 float32" for length in (64, 128, 192)]


def test_processes_do_not_overwrite_one_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    runs = []
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        runs.append(writer._run().folder)
        writer._runs.clear()  # as in a process on another host that shares the folder
        runs.append(writer._run().folder)
    assert len(set(runs)) == 4
    assert all(run.name.startswith("rank3_") and run.is_dir() for run in runs)


def test_names_of_folders(tmp_path: Path) -> None:
    names = [files.new_folder(tmp_path, name).name for name in ("0/0_1", "!1/0/0", "a b", "", "..", "0/0_1")]
    assert names == ["0_0_1", "1_0_0", "a_b", "_", "..-2", "0_0_1-2"]
    assert all(path.parent == tmp_path for path in tmp_path.iterdir())


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    files.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "new \udc80")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize(
    "broken", [(graph_page, "dot"), (writer, "_readable"), (graph_page.GraphPage, "_write_index")], ids=str
)
def test_a_failing_dump_warns_once_and_breaks_nothing(
    broken: tuple[Any, str], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(*broken, fail)
    with caplog.at_level(logging.WARNING, logger="dash_inductor"):
        for _ in range(2):
            torch.testing.assert_close(passes(causal, query()), causal(query()))
    assert [site.status for site in dash_inductor.sites()] == ["replaced"]
    assert len([r for r in caplog.records if "is incomplete: ZeroDivisionError: on purpose" in r.getMessage()]) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    config.dump = str(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="dash_inductor"):
        passes(causal, query())
    assert len(caplog.records) == 1


def test_nested_graphs_have_pages_of_their_own(folder: Path) -> None:
    def branches(x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.sum() > 0, lambda x: causal(x).sin(), lambda x: causal(x).cos(), (x,))

    passes(branches, query(), torch.ones(1))
    sites = [json.loads((g / "sites.json").read_text())["graphs"][0]["sites"] for g in graph_folders(folder)]
    assert sum(map(len, sites)) == len(dash_inductor.sites())
    assert max(map(len, sites)) == 1


def test_generated_code_and_no_cache(folder: Path) -> None:
    """With the cache on, a second compile would take the code from it; while the dump is set it is generated again.

    The backward is compiled when it is first run.
    """
    hits = []
    with fresh_cache(), inductor_config.patch(fx_graph_cache=True), config.patch(cpu="reference"):
        for dump in ("", "", str(folder)):
            torch._dynamo.reset()
            counters.clear()
            with config.patch(dump=dump):
                torch.compile(masked)(query(), torch.ones(2, 64)).sum().backward()
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 2, 0]
    (graph,) = graph_folders(folder)
    for kind, operator in (("forward", "attention_forward"), ("backward", "attention_backward")):
        assert f"torch.ops.dash_inductor.{operator}" in (graph / f"{kind}.py").read_text()
        assert f'href="{kind}.py"' in (graph / "index.html").read_text()
    around = [(graph / f"site_1_{when}.dot").read_text() for when in ("before", "after")]
    assert all('label="attention_mask\\n' in text for text in around)  # as the model calls it


def chain(*layers: int) -> Snapshot:
    """Layers of nodes, each of which reads all nodes of the layer before."""
    items: dict[str, Item] = {}
    before: tuple[str, ...] = ()
    for layer, count in enumerate(layers):
        names = tuple(f"n{layer}_{i}" for i in range(count))
        items |= {name: Item(name, name, "", name, "other", before) for name in names}
        before = names
    return Snapshot(items)


def test_a_neighbourhood_is_the_nearest_nodes() -> None:
    graph = chain(*[1] * 30)
    assert list(graph.around(["n15_0"]).items) == [f"n{i}_0" for i in range(15 - 6, 15 + 3)]
    wide = chain(1, 50, 1, 1)
    assert len(wide.around(["n2_0"]).items) == 36
    assert {"n2_0", "n3_0"} <= set(wide.around(["n2_0"]).items)


def test_dot() -> None:
    """Every node and edge that is shown, with what is special about them, and nothing that breaks the syntax."""
    far = Item("far", 'a "b"', "f32", "far = \\d\n", "ours", ("n0_0", "n1_0"))
    graph = Snapshot({**chain(1, 2).items, "far": far})
    shown = Snapshot({name: item for name, item in graph.items.items() if name != "n1_0"})
    assert (
        dot(graph, shown, ["far"], 'a "title"')
        == r"""digraph "a \"title\"" {
  node [shape=box, style="rounded,filled", fontname=monospace];
  "n0_0" [label="n0_0", tooltip="n0_0", fillcolor="#f4f4f2"];
  "n1_1" [label="n1_1", tooltip="n1_1", fillcolor="#f4f4f2"];
  "far" [label="a \"b\"\nf32", tooltip="far = \\d\n", fillcolor="#dcf3e4", style="rounded,filled,dashed", penwidth="3"];
  "n0_0" -> "n1_1";
  "n0_0" -> "far";
}
"""
    )


@functools.cache
def dom(page: Path) -> str:
    """The document that a browser makes of a page."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=True, timeout=HANGS).stdout  # type: ignore[list-item]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_in_a_browser(folder: Path) -> None:
    passes(masked, query(), torch.ones(2, 64))
    (graph,) = graph_folders(folder)
    seen = dom(graph / "index.html")
    (record,) = dash_inductor.sites()
    assert record.name in seen
    assert seen.count("<figure>") == 3
    for page in (folder / "index.html", graph.parent / "index.html", graph / "index.html"):
        text = dom(page) if page == folder / "index.html" else page.read_text()
        assert not re.search(r"https?:|//\w", text.replace("http-equiv", "")), page
        assert "default-src 'none'" in text
        for link in re.findall(r'href="([^"#]+)"', text):
            assert (page.parent / link).is_file(), (page, link)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.bfloat16, {"prepare", "hopper_backward", "finish", "hopper_forward"}),
        (torch.float32, {"kernel"}),
    ],
)
def test_kernels_of_a_gpu_without_one(dtype: torch.dtype, names: set[str], folder: Path) -> None:
    with writer.dumping(str(folder), "sm_90"):
        passes(causal, tensors((1, 2, 128, 64), dtype=dtype)[0])
    (graph,) = graph_folders(folder)
    page = (graph / "index.html").read_text()
    assert "Kernels on sm_90" in page
    (site,) = dash_inductor.explain(causal, tensors((1, 2, 128, 64), dtype=dtype)[0], arch="sm_90").sites
    assert site.site is not None
    assert site.plan is not None
    built = kernels.built(site.site, site.plan, "sm_90")
    assert {kernel.name for kernel in built} == names
    for kernel in built:
        assert 0 < kernel.resources.registers <= 255
        assert f"<td class=number>{kernel.resources.registers}</td>" in page
        for kind, ending in kernels.TEXTS.items():
            found = list((graph / "kernels" / "site_1").glob(f"*_{kernel.of}_{kernel.name}.{ending}"))
            assert kernel.texts[kind] in [path.read_text() for path in found]
