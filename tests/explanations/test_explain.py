"""`dash_inductor.explain`: what it says of every site, and that the program is afterwards as it was before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import _dash_inductor_state
import dash_inductor
from dash_inductor.config import config
from dash_inductor.errors import ArgumentError, DashError
from dash_inductor.explanations import html, text_blocks
from dash_inductor.explanations import text as explanation_text
from dash_inductor.explanations.explanation import Explanation
from dash_inductor.graph.arguments import in_source
from dash_inductor.model.plan import Fallback
from dash_inductor.model.reasons import Reason
from dash_inductor.planning import decide
from dash_inductor.records.records import GraphRecord
from dash_inductor.upstream import toolchain

from ..support.graphs import tensors

pytestmark = pytest.mark.usefixtures("deterministic")


class Attention(nn.Module):
    """Causal attention; with a mask, over the keys that it shows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.heads, self.calls = heads, 0

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if attention_mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            below = torch.ones(length, length, device=x.device).tril().bool()
            visible = attention_mask[:, None, None, :].bool() & below
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return out.transpose(1, 2).reshape(x.shape)


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width, 2) for _ in range(layers))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.steps += 1
        x = x + torch.rand_like(x)
        for layer in self.layers:
            x = x + layer(x, attention_mask)
        return x.square().mean()


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).bfloat16()


def inputs(batch: int = 2, length: int = 128, width: int = 128) -> Tensor:
    return torch.ones(batch, length, width, dtype=torch.bfloat16)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def with_graph_break(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = causal(query, key, value)
    torch._dynamo.graph_break()
    return causal(query, key, value)


def test_sites_of_a_gpu_without_one() -> None:
    explanation = dash_inductor.explain(model(), inputs(), attention_mask=torch.ones(2, 128), arch="sm_90")
    assert [site.record.module for site in explanation.sites] == ["layers.0", "layers.1"]
    for site in explanation.sites:
        assert site.site is not None
        assert (site.site.device, site.arch, site.record.inputs) == ("cuda", "sm_90", ("attention_mask",))
        assert site.decision == decide(site.site, "sm_90", compiler=toolchain.numerics())
        (chosen,) = (candidate for candidate in site.candidates if candidate.chosen)
        assert chosen.plan == site.plan
        assert chosen.kernel == "hopper"
        assert site.predicted_us == chosen.predicted_us
        assert len(site.candidates) > 5
        assert all(candidate.why for candidate in site.candidates)
    assert explanation.all_replaced


@pytest.mark.parametrize("split_kv", [True, False])
def test_the_setting_for_few_queries(split_kv: bool) -> None:
    with config.patch(split_kv=split_kv):
        given = tensors((1, 4, 1, 64), *[(1, 4, 2000, 64)] * 2, dtype=torch.float16)
        (site,) = dash_inductor.explain(F.scaled_dot_product_attention, *given, arch="sm_90").sites
    assert site.plan is not None
    assert (site.plan.forward, site.plan.split_kv) == ("hopper", split_kv)
    assert ("split_kv=off" in site.plan.numerics_key) != split_kv
    assert [candidate.plan for candidate in site.candidates if candidate.chosen] == [site.plan]


def test_another_architecture_has_another_plan() -> None:
    found = {}
    for arch in ("sm_80", "sm_90", "cpu"):
        with config.patch(cpu="reference"):
            (site,) = dash_inductor.explain(
                causal, *tensors(*[(1, 2, 64, 64)] * 3, dtype=torch.float16), arch=arch
            ).sites
        assert site.plan is not None
        found[arch] = site.plan.kernel
    assert found == {"sm_80": "portable", "sm_90": "hopper", "cpu": "reference"}
    with pytest.raises(ArgumentError, match="fn=3 is not allowed"):
        dash_inductor.explain(3)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ArgumentError, match="arch='v100' is not allowed"):
        dash_inductor.explain(causal, arch="v100")


def test_a_fallback_site_has_advice_and_what_is_known() -> None:
    (site,) = dash_inductor.explain(causal, *tensors(*[(1, 2, 64, 64)] * 3)).sites
    assert (site.fallback, site.advice) == (Fallback(Reason.CPU_OFF), Reason.CPU_OFF.advice)
    (site,) = dash_inductor.explain(causal, *tensors(*[(1, 2, 64, 520)] * 3), arch="sm_90").sites
    assert site.fallback is not None
    assert (site.fallback.reason, site.plan) == (Reason.HEAD_DIM, None)
    assert "up to 512 in 16 bits" in site.fallback.detail
    assert site.site is not None
    assert not any(candidate.chosen for candidate in site.candidates)


def test_the_architecture_decides_what_an_architecture_keeps() -> None:
    """At head dimension 520 a GPU has no kernel, and the CPU has one."""
    arguments = tensors(*[(1, 2, 64, 520)] * 3, dtype=torch.float32)
    with config.patch(cpu="reference"):
        (on_cpu,) = dash_inductor.explain(causal, *arguments).sites
    (on_hopper,) = dash_inductor.explain(causal, *arguments, arch="sm_90").sites
    assert on_cpu.plan is not None
    assert on_hopper.fallback is not None
    assert on_hopper.fallback.reason is Reason.HEAD_DIM


def test_every_graph_of_a_function_is_seen() -> None:
    explanation = dash_inductor.explain(with_graph_break, *tensors(*[(1, 2, 64, 32)] * 3))
    assert len(explanation.graphs) == len(explanation.sites) == 2
    assert len({graph.compile_id for graph in explanation.graphs}) == 2
    assert explanation.notes == ()


def test_a_call_that_zeros_end_is_noted() -> None:
    def inverse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = causal(query, key, value).sum().item()
        return query * (1 / scale)

    arguments = tensors(*[(1, 2, 64, 32)] * 3)
    inverse(*arguments)  # the sum is not zero
    explanation = dash_inductor.explain(inverse, *arguments)
    assert len(explanation.sites) == 1
    assert "ZeroDivisionError" in explanation.notes[0]


def test_errors_of_the_function_itself_are_raised() -> None:
    def broken(query: Tensor) -> Tensor:
        raise KeyError("no such layer")

    with pytest.raises(Exception, match="no such layer"):
        dash_inductor.explain(broken, torch.ones(1))


def test_nothing_to_explain() -> None:
    explanation = dash_inductor.explain(torch.sin, torch.ones(3, requires_grad=True))
    assert explanation.sites == ()
    assert "no attention" in explanation.notes[0]
    assert "no attention" in str(explanation)


def test_settings_of_the_program_do_not_hide_a_site() -> None:
    torch.use_deterministic_algorithms(False)
    arguments = tensors(*[(1, 2, 64, 32)] * 3)
    with config.patch(strict=True), dash_inductor.disabled(), torch.no_grad():
        explanation = dash_inductor.explain(causal, *arguments, arch="sm_90")
        assert config.strict
        assert not dash_inductor.is_enabled()
        assert not torch.is_grad_enabled()
    assert len(explanation.sites) == 1
    assert "use_deterministic_algorithms(True)" in explanation.notes[0]
    assert not torch.are_deterministic_algorithms_enabled()


def test_switched_off_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dash_inductor_state, "off_by_environment", lambda: True)
    with pytest.raises(DashError, match="DASH_INDUCTOR=0 is set"):
        dash_inductor.explain(causal)


def argument(module: Model, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("way", ["module", "method", "closure", "argument"])
def test_the_program_is_as_before(way: str) -> None:
    """Run for real, the same call changes each of these."""

    def state(module: Model) -> tuple[Any, ...]:
        values = [t.clone() for t in (*module.parameters(), *module.buffers())]
        calls = [layer.calls for layer in module.layers]
        return values, calls, torch.get_rng_state(), dash_inductor.graphs(), sorted(vars(module.layers[0]))

    def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> list[bool]:
        values = all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        return [values, a[1] == b[1], torch.equal(a[2], b[2]), *(x == y for x, y in zip(a[3:], b[3:], strict=True))]

    module = model(layers=1)
    functions = {"module": module, "method": module.forward, "closure": lambda x: module(x), "argument": argument}
    buffer, before = module.steps, state(module)
    dash_inductor.explain(functions[way], *([module] if way == "argument" else []), inputs())
    assert all(same(state(module), before))
    assert module.steps is buffer
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.compile(module, backend="aot_eager")(inputs())
    assert same(state(module), before)[:3] == [False, False, False]


def test_what_the_program_compiled_stays_compiled() -> None:
    counter = CompileCounter()
    compiled = torch.compile(causal, backend=counter)
    arguments = tensors(*[(1, 2, 64, 32)] * 3)
    compiled(*arguments)
    dash_inductor.explain(compiled, *arguments)
    dash_inductor.explain(causal, *tensors(*[(1, 2, 128, 32)] * 3))
    compiled(*arguments)
    assert counter.frame_count == 1


@pytest.mark.parametrize("explained", [True, False])
def test_other_sizes_do_not_make_the_program_dynamic(explained: bool) -> None:
    """The control: where the program itself is called with both sizes, the second graph is dynamic."""
    sizes: list[Any] = []

    def look(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        sizes.append([type(node.meta["example_value"]) for node in graph.graph.find_nodes(op="placeholder")])
        return graph.forward

    compiled = torch.compile(causal, backend=look)
    other = tensors(*[(1, 2, 128, 32)] * 3)
    if explained:
        dash_inductor.explain(causal, *other)
    else:
        compiled(*other)
    compiled(*tensors(*[(1, 2, 64, 32)] * 3))
    assert (torch.SymInt in sizes[-1]) is not explained


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    """Two equal layers and a site that is not replaced, planned for sm_90."""
    torch.use_deterministic_algorithms(True)
    layers = dash_inductor.explain(model(), inputs(), attention_mask=torch.ones(2, 128), arch="sm_90")
    fallback = dash_inductor.explain(causal, *tensors(*[(1, 2, 64, 520)] * 3), arch="sm_90")
    notes = ("A note of `code` that is so long that it does not fit into one line of the table of 100 columns at all.",)
    return Explanation((*layers.graphs, *fallback.graphs), (*layers.sites, *fallback.sites), notes)


def test_the_text_fits_and_says_all(explanation: Explanation) -> None:
    text = str(explanation)
    assert max(map(len, text.splitlines())) <= text_blocks.WIDTH
    assert text.splitlines()[0] == explanation_text.headline(explanation)
    words = " ".join(text.split())
    assert "2 of 3 attention sites replaced on sm_90, 1 not replaced" in words
    assert "sites 1-2: " in words  # equal layers are told once
    assert "layers.*" in words
    assert "read from attention_mask" in words
    assert "not replaced: head_dim" in words
    assert Reason.HEAD_DIM.advice.split(".")[0] in words
    chosen = [line.split()[1] for line in text.splitlines() if line.startswith("  > ") and "chosen" not in line]
    assert chosen == [site.plan.schedule for site in explanation.sites[:1] if site.plan]
    for candidate in explanation.sites[0].candidates:
        assert candidate.schedule is None or candidate.schedule in words


@pytest.mark.parametrize(
    ("modules", "shown"),
    [
        (("", ""), ""),
        (("layers.0.attn", "layers.0.attn"), "layers.0.attn"),
        (("layers.0.attn", "layers.11.attn"), "layers.*.attn"),
        (("0", "1"), "*"),
        (("blocks.0.layers.1", "blocks.0.layers.2"), "blocks.0.layers.*"),
        (("encoder.attn", "decoder.attn"), "encoder.attn, decoder.attn"),
        (("h.0.self", "h.1.self", "h.0.cross", "h.1.cross"), "h.*.self, h.*.cross"),
        (("layer1.0", "layer2.0"), "layer1.0, layer2.0"),
        (("a", "b", "c", "d"), "a, b, c, ..."),
    ],
)
def test_the_modules_of_equal_sites(modules: tuple[str, ...], shown: str, explanation: Explanation) -> None:
    first = explanation.sites[0]
    sites = [replace(first, record=replace(first.record, module=module)) for module in modules]
    assert explanation_text.module(list(enumerate(sites, start=1))) == shown


def test_a_site_that_differs_has_a_part_of_its_own(explanation: Explanation) -> None:
    first, second, fallback = explanation.sites
    for other in (
        replace(second, record=replace(second.record, line="model.py:7")),
        replace(second, record=replace(second.record, mask="full")),
        replace(second, decision=Fallback(Reason.LAYOUT)),
    ):
        changed = replace(explanation, sites=(first, other, fallback))
        assert [explanation_text.numbers(group) for group in explanation_text.grouped(changed)] == ["1", "2", "3"]


def test_inputs_of_a_module_that_counts_its_calls_have_plain_names() -> None:
    """If a module assigns to itself, Dynamo reaches its parts by its dictionary."""
    assert in_source("L['self']._modules['0'].__dict__['_modules']['qkv']._parameters['bias']") == "self.0.qkv.bias"


def test_numbers_of_sites() -> None:
    group = [(number, None) for number in (1, 2, 3, 5, 7, 8)]
    assert explanation_text.numbers(group) == "1-3, 5, 7-8"  # type: ignore[arg-type]  # the numbers alone are read


def test_json(explanation: Explanation) -> None:
    read = json.loads(json.dumps(explanation.to_dict()))
    sites = [site for graph in read["graphs"] for site in graph["sites"]]
    assert [site["decision"]["status"] for site in sites] == ["replaced", "replaced", "fallback"]
    assert sites[2]["decision"]["advice"] == Reason.HEAD_DIM.advice
    assert [c["why"] for c in sites[0]["candidates"]] == [c.why for c in explanation.sites[0].candidates]
    assert [GraphRecord.from_dict(graph) for graph in read["graphs"]] == list(explanation.graphs)


def test_page(explanation: Explanation) -> None:
    page = explanation.to_html()
    assert "http:" not in page
    assert "https:" not in page
    assert "default-src 'none'" in page
    assert page.count("<section class=card>") == 2
    assert all(site.record.name in page for site in explanation.sites)
    hostile = replace(explanation.sites[0].record, module="<script>alert(1)</script>")
    page = replace(explanation, sites=(replace(explanation.sites[0], record=hostile), *explanation.sites[1:])).to_html()
    assert "<script" not in page


def test_columns_without_a_text_are_left_out() -> None:
    header, rows = ("a", ">b", "c"), (("1", "", "x"), ("", "", "y"))
    assert text_blocks.filled(header, rows) == (("a", "c"), [("1", "x"), ("", "y")])
    assert text_blocks.filled(header, ()) == (header, [])
    assert "b" not in text_blocks.text([text_blocks.Table(header, rows, marked=frozenset({1}))])
    assert "<th class=number>b" not in html.table(header, rows)
    assert "<th class=number>b" in html.table(header, [*rows, ("", "3", "")])


def test_a_legend_has_what_the_tables_have(explanation: Explanation) -> None:
    """Portable kernels have no predicted times: no column and no legend speaks of them."""

    def with_times(time: float | None) -> Explanation:
        sites = [
            replace(site, candidates=tuple(replace(one, predicted_us=time, why="") for one in site.candidates))
            for site in explanation.sites
        ]
        return replace(explanation, sites=tuple(sites))

    for time in (None, 3.0):
        for shown in (str, Explanation.to_html):
            assert ("µs" in shown(with_times(time))) is (time is not None)
            assert "tile pairs: the shortest" in shown(with_times(time))
