"""The doctor and FlexAttention, which trains on GPUs alone: found in eager mode, and replaced in compiled code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
