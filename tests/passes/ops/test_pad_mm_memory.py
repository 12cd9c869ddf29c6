"""What the code of a language model's head allocates on an H100, where its products are padded."""

from __future__ import annotations

import json
import re

import pytest

from ...support.fakecuda import compiler
from ...support.forks import FAKE_GPU, run_forked
from .allocated import peak

PROGRAM = """
    import json

    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    import dash_inductor
    from dash_inductor.config import REWRITES
    from tests.support.generated import codes

    torch.use_deterministic_algorithms(True)

    def head(x, weight, targets):
        return F.cross_entropy(F.linear(torch.tanh(x), weight).float(), targets)

    def tied(x, weight, targets):
        return head(F.embedding(targets, weight) + x, weight, targets)

    def rolled(x, weight, targets):
        return F.cross_entropy(F.linear(torch.tanh(F.embedding(targets, weight)), weight).float(), targets.roll(1))

    found = {}
    for function in (head, tied, rolled):
        for pads in ("on", "off"):
            dash_inductor.config.rewrites = "all" if pads == "on" else set(REWRITES) - {"pad_mm"}
            with FakeTensorMode():
                x, weight = (
                    torch.empty(n, 768, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (4096, 50257)
                )
                targets = torch.empty(4096, device="cuda", dtype=torch.int64)
                found[f"{function.__name__} {pads}"] = codes(function, x, weight, targets)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def codes() -> dict[str, list[str]]:
    """Forward and backward of a head, of one whose weight embeds the tokens, and of one whose targets are computed,
    with and without padding.  In the last one, Inductor keeps logits and their gradient at the same time.
    """
    found: dict[str, list[str]] = json.loads(run_forked(FAKE_GPU, PROGRAM).stdout.splitlines()[-1])
    return found


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_the_gradient_of_logits_takes_their_place(codes: dict[str, list[str]]) -> None:
    """The forward allocates the padded logits, and the backward a tensor of their size only where PyTorch does."""
    for name in ("head on", "tied on"):
        wide = [re.findall(r"empty_strided_cuda\(\(4096, (502\d\d|503\d\d)\)", code) for code in codes[name]]
        assert wide == [["50304"], []]
    for pads, size in (("on", "50304"), ("off", "50257")):
        wide = [re.findall(rf"empty_strided_cuda\(\(4096, ({size})\)", code) for code in codes[f"rolled {pads}"]]
        assert wide == [[size], [size]]


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("model", ["head", "tied", "rolled"])
def test_peak_memory_is_that_of_products_that_are_not_padded(model: str, codes: dict[str, list[str]]) -> None:
    """The copy of the weight is gone before its gradient is there, and is not kept between forward and backward.  What
    is left are columns and rows of zeros, and sums along the rows of logits.
    """
    weight = frozenset({"50257, 768", "768, 50257"})
    padded, plain = (max(peak(code, weight) for code in codes[f"{model} {pads}"]) for pads in ("on", "off"))
    assert plain > 4 * 10**8
    assert padded <= 1.001 * plain
