"""What the doctor says of operators whose bits may depend on the number of rows, in programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from dash_inductor import cli
from dash_inductor.doctor import Severity
from dash_inductor.doctor.batch_invariance import BatchInvariance
from dash_inductor.doctor.batch_operators import Depends, depends
from dash_inductor.model import AttentionSpec, Band, Mask, Site
from dash_inductor.model.site import DType
from dash_inductor.planning import plan
from dash_inductor.records.records import GraphRecord, SiteRecord, add
from dash_inductor.upstream import seams


class _Read(Exception):
    """Ends a compile when its graph has been read."""


def read(function: Callable[..., Any], *args: Any) -> set[Depends]:
    """What the operators of a compiled forward depend on, except those that are batch invariant."""
    found = set[Depends]()

    def look(function: Any) -> Callable[..., Any]:
        def looked(graph: GraphModule, *args: Any, **kwargs: Any) -> None:
            modules = [module for module in graph.modules() if isinstance(module, GraphModule)]
            found.update(filter(None, (depends(node) for module in modules for node in module.graph.nodes)))
            raise _Read

        return looked

    with seams.GENERATE.wrapped(look), pytest.raises(Exception, match="_Read"):
        torch.compile(function)(*args)
    return found - {Depends.NOTHING}


def counted(x: Tensor) -> Tensor:
    return x * (x > 0).sum(-1, keepdim=True)


def choosing(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.softmax(-1), lambda x: x @ x, (x,))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], set[Depends]]] = {
    "Linear": (nn.Linear(8, 8), (4, 6, 8), {Depends.PRODUCT}),
    "Conv1d": (nn.Conv1d(6, 6, 3), (4, 6, 8), {Depends.PRODUCT}),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(8, 8, 8)), (4, 6, 8), {Depends.PRODUCT}),
    "LayerNorm": (nn.LayerNorm(8), (4, 6, 8), {Depends.ROW}),
    "RMSNorm": (nn.RMSNorm(8), (4, 6, 8), {Depends.ROW}),
    "GroupNorm": (nn.GroupNorm(2, 6), (4, 6, 8), {Depends.ROW}),
    "BatchNorm1d": (nn.BatchNorm1d(6), (4, 6, 8), {Depends.BATCH}),
    "BatchNorm1d, evaluation": (nn.BatchNorm1d(6).eval(), (4, 6, 8), set()),
    "softmax": (lambda x: x.softmax(-1), (4, 6, 8), {Depends.ROW}),
    "log_softmax": (lambda x: x.log_softmax(-1), (4, 6, 8), {Depends.ROW}),
    "sum of a row": (lambda x: x.sum(-1), (4, 6, 8), {Depends.ROW}),
    "sum over rows": (lambda x: x.sum((0, 1)), (4, 6, 8), {Depends.BATCH}),
    "sum over tokens of one batch element": (lambda x: x.sum(1), (1, 6, 8), {Depends.BATCH}),
    "mean of all": (lambda x: x.square().mean(), (4, 6, 8), {Depends.BATCH}),
    "largest of all, as scales of 8 bits are": (lambda x: x / x.abs().max(), (4, 6, 8), {Depends.BATCH}),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, x.argmax(1)), (4, 8), {Depends.ROW, Depends.BATCH},
    ),
    "activations": (lambda x: F.silu(x) * F.gelu(x) + x.tanh(), (4, 6, 8), set()),
    "embedding": (lambda x: F.embedding(x.argmax(-1), torch.ones(8, 4)), (4, 6, 8), set()),
    "counts of a row": (counted, (4, 6, 8), set()),
    "cumsum": (lambda x: x.cumsum(1), (4, 6, 8), {Depends.ROW}),
    "topk": (lambda x: x.topk(2), (4, 6, 8), {Depends.CHOICE}),
    "sort": (lambda x: x.sort(-1), (4, 6, 8), {Depends.CHOICE}),
    "stable sort": (lambda x: x.sort(dim=-1, stable=True), (4, 6, 8), set()),
    "dropout": (lambda x: F.dropout(x), (4, 6, 8), {Depends.RANDOM}),
    "fft": (lambda x: torch.fft.rfft(x).abs(), (4, 6, 8), {Depends.UNKNOWN}),
    "index_add": (lambda x: x.index_add(0, x[:, 0, 0].long(), x), (4, 6, 8), {Depends.BATCH}),
    "scatter_add in a row": (lambda x: x.scatter_add(1, x.long(), x), (4, 6, 8), {Depends.ROW}),
    "scatter of rows": (lambda x: x.scatter(1, x.long(), x), (4, 6, 8), set()),
    "attention, not replaced": (
        lambda x: F.scaled_dot_product_attention(x, x, x), (4, 2, 6, 8), {Depends.ATTENTION},
    ),
    "a choice between subgraphs": (choosing, (4, 8, 8), {Depends.ROW, Depends.PRODUCT, Depends.BATCH}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    function, shape, expected = PROGRAMS[name]
    assert read(function, torch.zeros(shape)) == expected


@torch.library.custom_op("test_batch_invariance::own", mutates_args=())
def own(x: Tensor) -> Tensor:
    return x * 2


@own.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_operators_of_programs_are_not_known() -> None:
    assert read(own, torch.zeros(4, 8)) == {Depends.UNKNOWN}


def test_without_graphs() -> None:
    ((severity, what, _),) = BatchInvariance().batch_invariance()
    assert (severity, what) == (Severity.NOTE, "no graph was compiled, and operators outside of graphs are not read")


TRAINING = """
import torch
import torch.nn.functional as F
from torch import nn

import dash_inductor

dash_inductor.config.cpu = "reference"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        q = self.norm(x)  # the norm
        q = self.up(q).unflatten(-1, (2, 16)).transpose(1, 2)  # the product
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()  # the loss

model, x = Model(), torch.randn(3, 24, 32)
torch.compile(model)(x).backward()
"""


def of_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> list[dict[str, str]]:
    """The findings about batch invariance; a number of a line is replaced by the comment at its end."""
    script = tmp_path / "train.py"
    script.write_text(text)
    cli.main(["doctor", "--once", "--json", *words, str(script)])
    found = json.loads(capsys.readouterr().out)["findings"]
    lines = {f"{script}:{n}": line.split("# ")[1] for n, line in enumerate(text.splitlines(), 1) if "# " in line}
    for finding in found:
        for place, comment in lines.items():
            finding["what"] = finding["what"].replace(place, comment)
    return [finding for finding in found if finding["check"] == "batch_invariance"]


def test_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invariant, attention, products, rows, batch = of_script(tmp_path, capsys, TRAINING, "--batch-invariance")
    assert invariant["severity"] == attention["severity"] == "ok"
    assert invariant["what"].startswith("operators of the compiled graphs (1 of forwards and 1 of backwards)")
    assert attention["what"] == "attention sites that are replaced, and are batch invariant: 1"
    assert [finding["severity"] for finding in (products, rows, batch)] == ["note"] * 3
    kind, first, *_ = products["what"].splitlines()
    assert (kind, first) == (f"{Depends.PRODUCT.value}:", "  addmm (1 in forwards; first at the product, in up)")
    assert rows["what"].startswith(
        f"{Depends.ROW.value}:\n  native_layer_norm (1 in forwards; first at the norm, in norm)"
    )
    assert batch["what"].startswith(f"{Depends.BATCH.value}:\n  mean (1 in forwards; first at the loss)")
    assert "sum (1 in backwards" in batch["what"]  # the gradient of a bias


def test_nobody_is_told_who_has_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert of_script(tmp_path, capsys, TRAINING) == []


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    assert cli.main(["doctor", "--once", "--batch-invariance", str(script)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["addmm", "(1", "in", "forwards;", "first", "at"] in [line[:6] for line in lines]
    assert ["ok", "batch", "invariance", "attention"] in [line[:4] for line in lines]  # not folded


def test_a_script_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--batch-invariance"]) == 2
    assert "--batch-invariance" in capsys.readouterr().err


def test_dropout_of_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINING.replace("is_causal=True", "dropout_p=0.5")
    found = of_script(tmp_path, capsys, text, "--batch-invariance")
    assert found[1]["severity"] == "note"
    assert found[1]["what"].startswith("attention sites that are replaced, and drop other pairs at other places")


ONE, LONG, SHORT = 1, 4096, 1024


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
@pytest.mark.parametrize("kv_len", [SHORT, LONG, None])
@pytest.mark.parametrize("q_len", [ONE, 16, 17, None])
@pytest.mark.parametrize("mask", [Band(), Band(0)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_queries(arch: str, kv_len: int | None, q_len: int | None, mask: Band, dtype: DType) -> None:
    """Only the forwards that may split keys, at lengths that they may have, have a finding of their own."""
    site = Site("cuda", dtype, 2, 8, 8, q_len, kv_len, 128, 128, AttentionSpec(Mask(mask), 128**-0.5))
    record = SiteRecord("name", "op", "replaced", None, "", site, plan(site, arch), "", str(mask), "model.py:12")
    reading = BatchInvariance()
    reading.compiled(GraphModule({}, Graph()), False)
    add(GraphRecord("", "inference", "compiled", (record,)))
    _, (severity, what, _) = reading.batch_invariance()
    splits = arch == "sm_90" and dtype == "bfloat16" and mask.is_full and q_len != 17 and kv_len != SHORT
    few = "attention sites that are replaced, and split the keys for few queries, by the numbers of queries and keys: 1"
    assert what == (
        f"{few}; first at model.py:12" if splits else "attention sites that are replaced, and are batch invariant: 1"
    )
    assert severity is (Severity.NOTE if splits else Severity.OK)


def test_forward_that_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINING.replace(
        'config.cpu = "reference"', 'config.cpu, dash_inductor.config.forward = "reference", "keep"'
    )
    found = of_script(tmp_path, capsys, text, "--batch-invariance")
    assert not [finding for finding in found if "replaced, and" in finding["what"]]
    assert f"{Depends.ATTENTION.value}:" in [finding["what"].splitlines()[0] for finding in found]


def test_rounding_to_16_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRAINING.replace("Model(), torch.randn(3, 24, 32)", "Model().bfloat16(), torch.randn(3, 24, 32).bfloat16()")

    def kinds(text: str) -> list[str]:
        found = of_script(tmp_path, capsys, text, "--batch-invariance")
        return [finding["what"].splitlines()[0] for finding in found]

    assert f"{Depends.FUSION.value}:" in kinds(text)
    assert f"{Depends.FUSION.value}:" not in kinds(
        text.replace("torch.compile(model)", 'torch.compile(model, options={"emulate_precision_casts": True})')
    )


class Block(nn.Module):
    """A block whose elementwise operators Inductor fuses in another way without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_gradients_change_no_bit_where_16_bits_are_rounded() -> None:
    """A forward without gradients has the bits of one with gradients, although Inductor fuses other operators."""
    model = nn.Sequential(Block(), Block(), nn.LayerNorm(64)).bfloat16()
    model = torch.compile(model, options={"emulate_precision_casts": True})
    x = torch.randn(4, 16, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        scored = model(x)
    assert torch.equal(model(x), scored)
