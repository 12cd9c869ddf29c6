"""Models of transformers with attention of the kernels hub: replaced, or with a record; named by the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dash_inductor
from dash_inductor import cli, config, sites
from dash_inductor.errors import FallbackError
from dash_inductor.model.reasons import Reason
from dash_inductor.records.records import clear_sites

from ..support.distribution import ROOT
from ..support.hf_models import build, inputs_of

pytest.importorskip("transformers", reason="the models come from the extra 'hf'")

from ..support.hub_kernels import FLASH_ATTN2, FLASH_ATTN3, FLASH_ATTN4, hub

NOT_TRACED = {
    FLASH_ATTN3: "_vllm_flash_attn3_cuda_0a1b2c3.FlashAttnFunc, breaks the graph: Operator does not support running "
    "with fake tensors (unsupported operator: _vllm_flash_attn3_0a1b2c3.fwd.default)",
    FLASH_ATTN4: "_flash_attn4_cuda_0a1b2c3.FlashAttnFunc, breaks the graph: Call to `torch._dynamo.graph_break()`",
}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch._dynamo.reset()
    clear_sites()
    torch.use_deterministic_algorithms(True)
    with config.patch(cpu="reference"), hub():
        yield


def step(model: Any, run: Any) -> list[Tensor]:
    """The loss, and the gradients."""
    model.zero_grad()
    loss = run(**inputs_of("Llama", "plain", length=24)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def model_of(implementation: str) -> Any:
    model: Any = build("Llama").to(torch.bfloat16)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("repository", [FLASH_ATTN2, FLASH_ATTN3, FLASH_ATTN4])
def test_compiled(repository: str) -> None:
    """A compiled model computes what "sdpa" does, and no attention is left without a record."""
    model = model_of(repository)
    exact = step(*[build("Llama").double()] * 2)
    for ours, true in zip(step(model, torch.compile(model)), exact, strict=True):
        assert (ours.double() - true).abs().max() <= 0.05 * true.abs().max() + 1e-4
    found = sites()
    if repository == FLASH_ATTN2:
        assert {(record.status, record.mask) for record in found} == {("replaced", "causal")}
        return
    (record,) = found  # one line calls it in all layers
    assert (record.status, record.reason) == ("fallback", Reason.SKIPPED)
    assert record.detail.startswith(NOT_TRACED[repository])
    assert Path(record.line.rpartition(":")[0]).name == "modeling_llama.py"


@pytest.mark.parametrize("repository", [FLASH_ATTN3, FLASH_ATTN4])
def test_strict_does_not_pass(repository: str) -> None:
    model = model_of(repository)
    with config.patch(strict=True), pytest.raises(FallbackError, match=r"skipped: .*FlashAttnFunc, breaks the graph"):
        step(model, torch.compile(model))


def test_strict_passes_what_is_replaced() -> None:
    model = model_of(FLASH_ATTN2)
    with config.patch(strict=True):
        step(model, torch.compile(model))


@pytest.mark.parametrize("off", ["flag", "switch", "cpu"])
def test_nothing_is_recorded_while_it_is_off(off: str) -> None:
    model = model_of(FLASH_ATTN3)
    torch.use_deterministic_algorithms(off != "flag")
    if off == "switch":
        with dash_inductor.disabled():
            step(model, torch.compile(model))
    else:
        with config.patch(cpu="off" if off == "cpu" else "reference", strict=True):
            step(model, torch.compile(model))
    assert not sites()


def test_the_name_to_write_in_its_place() -> None:
    """The advice holds: an eager model with it has records of replaced attention."""
    dash_inductor.register()
    model = model_of("dash_inductor")
    with config.patch(strict=True):
        step(model, model)
    assert {record.status for record in sites()} == {"replaced"}


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import torch
from tests.support.hf_models import build, inputs_of
from tests.support.hub_kernels import hub

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
with hub():
    model = build("Llama")
    model.set_attn_implementation({repository!r})
    model(**inputs_of("Llama", "plain", length=24)).loss.backward()
"""


@pytest.mark.parametrize(
    ("repository", "advice"),
    [
        (FLASH_ATTN2, "Call it in what is compiled"),
        (FLASH_ATTN3, "Dynamo cannot trace it"),
        (FLASH_ATTN4, "Dynamo cannot trace it"),
    ],
)
def test_the_doctor_names_it(repository: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a program that is not compiled, which has no records: the line, and the name to write in its place."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(root=str(ROOT), repository=repository))
    assert cli.main(["doctor", "--json", "--once", str(script)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = [finding for finding in found if finding["check"] == "eager_attention"]
    assert "FlashAttnFunc at" in finding["what"]
    assert "ran in eager mode" in finding["what"]
    assert advice in finding["advice"]
    assert 'attn_implementation="dash_inductor"' in finding["advice"]
    told = [finding["what"] for finding in found if finding["check"] == "flag_at_attention"]
    assert told
    assert all("was given deterministic=False" in what for what in told)
