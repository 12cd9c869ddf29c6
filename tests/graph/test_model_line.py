"""The line of the model that a record names: of the stack of a node, the innermost frame that is the model's."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from dash_inductor.graph.model_line import model_line

LIB = "/venv/lib/python3.11/site-packages"
TORCH = f"{LIB}/torch/nn/attention/__init__.py", 9, "flex_attention"
HELPER = f"{LIB}/transformers/integrations/sdpa_attention.py", 182, "sdpa_attention_forward"
LAYER = f"{LIB}/transformers/models/llama/modeling_llama.py", 258, "forward"
PROCESSOR = f"{LIB}/diffusers/models/transformer_flux.py", 118, "__call__"
DISPATCH = f"{LIB}/diffusers/models/attention_dispatch.py", 381, "dispatch_attention_fn"
FLASH = f"{LIB}/flash_attn/flash_attn_interface.py", 839, "forward"
FLASH_3 = f"{LIB}/flash_attn_3/hopper/flash_attn_interface.py", 839, "forward"
MINE = "/home/me/model.py", 12, "attend"
MODULE = "/home/me/model.py", 30, "forward"


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([MODULE, MINE], MINE),
        ([MODULE, MINE, TORCH], MINE),
        ([MODULE, MINE, FLASH], MINE),
        ([MODULE, FLASH_3], MODULE),
        ([LAYER, HELPER], LAYER),
        ([MODULE, LAYER, HELPER], LAYER),
        ([LAYER, HELPER, FLASH], LAYER),
        ([PROCESSOR, DISPATCH, HELPER], PROCESSOR),
        ([MODULE, HELPER], MODULE),
        ([HELPER], HELPER),
        ([FLASH], FLASH),
        ([TORCH], TORCH),
    ],
)
def test_line(stack: list[tuple[str, int, str]], expected: tuple[str, int, str]) -> None:
    node = Graph().call_function(torch.add)
    frames = (f'  File "{file}", line {line}, in {function}\n    code\n' for file, line, function in stack)
    node.meta["stack_trace"] = "".join(frames)
    assert model_line([node]) == (f"{expected[0]}:{expected[1]}", "")


def test_nodes_without_a_stack() -> None:
    assert model_line([Graph().call_function(torch.add)]) == ("", "")
