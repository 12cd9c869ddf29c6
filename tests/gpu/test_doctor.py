"""The doctor on GPUs: FlexAttention in eager mode and in compiled code, and operators that hear the flag or do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dash_inductor import cli

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

PROGRAM = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
torch.compile(flex_attention)(q, q, q, block_mask=mask).sum().backward()
torch.compile(lambda q: flex_attention(q, q, q, block_mask=mask))(q).sum().backward()
flex_attention(q, q, q, block_mask=mask).sum().backward()  # here
"""


def test_flex_attention_in_eager_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    cli.main(["doctor", "--json", str(script)])
    found = json.loads(capsys.readouterr().out)["findings"]
    (eager,) = (one for one in found if one["check"] == "eager_attention")
    assert eager["what"].startswith(f"the attention flex_attention at {script}:11 ran in eager mode: dash_inductor")
    assert "flex_attention(q, q, q, block_mask=mask).sum().backward()" in eager["advice"]
    assert "attention sites that are replaced: 2" in [one["what"] for one in found]


ATOMICS = """
import sys
import torch
from torch import nn

if sys.argv[1] == "flag":
    torch.use_deterministic_algorithms(True)
torch.manual_seed(0)

class Scatter(nn.Module):
    def forward(self, x):
        index = torch.arange(x.shape[0], device=x.device) % 4
        return torch.zeros(4, x.shape[1], device=x.device).index_add(0, index, x)

class Pick(nn.Module):
    def forward(self, x):
        return x.index_select(0, torch.zeros(1 << 16, dtype=torch.int64, device=x.device)).square()

model = nn.Sequential(nn.Linear(64, 64), Scatter(), nn.Linear(64, 64), Pick()).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
x = torch.randn(1 << 18, 64, device="cuda")
for _ in range(2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("word", ["flag", "no flag"])
def test_atomics_are_found_without_the_flag(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(False)
    script = tmp_path / "train.py"
    script.write_text(ATOMICS)
    cli.main(["doctor", "--json", str(script), word])
    found = json.loads(capsys.readouterr().out)["findings"]
    said = {one["check"]: one for one in found}
    (runs,) = (one for one in found if one["check"] == "two_runs")
    if word == "flag":
        assert runs["severity"] == "ok", runs
        assert "give equal bits: Sequential (" in runs["what"]
        assert said["flag_at_operators"]["severity"] == "ok"
        assert "index_add" in said["flag_at_operators"]["what"]
        return
    assert runs["severity"] == "warning"
    assert "the output of Sequential.1 (Scatter) differs, and everything before it is equal" in runs["what"]
    assert "The operator index_add in 1 at train.py:13 gives other bits for equal inputs" in runs["what"]
    assert "In that module ran index_add at" in runs["what"]
    assert said["flag"]["what"] == "the program trains and never sets deterministic algorithms"
    deaf = [one["what"] for one in found if one["check"] == "flag_at_operators"]
    assert any(what.startswith("index_add at") and "in Sequential.1 (Scatter)" in what for what in deaf)
    assert any(what.startswith("index_add at") and "in Sequential.3 (Pick)" in what for what in deaf)
