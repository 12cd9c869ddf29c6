"""What the code of upsampled logits allocates on an H100, beside PyTorch's own without determinism."""

from __future__ import annotations

import json

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
    from tests.support.generated import codes

    def head(x, weight, targets):
        logits = F.linear(x.relu(), weight).permute(0, 3, 1, 2)
        upsampled = F.interpolate(logits, size=targets.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(upsampled, targets)

    found = {}
    for scale in (4, 16):
        for ours in (True, False):
            torch.use_deterministic_algorithms(ours)
            dash_inductor.enable() if ours else dash_inductor.disable()
            with FakeTensorMode():
                x, weight = (
                    torch.empty(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
                    for shape in ((4, 64, 64, 256), (150, 256))
                )
                targets = torch.empty(4, 64 * scale, 64 * scale, device="cuda", dtype=torch.int64)
                found[f"{scale} {ours}"] = codes(head, x, weight, targets)
    print(json.dumps(found))
"""


@pytest.mark.full
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_upsampled_logits() -> None:
    """Positions are computed once, and the gradient of logits where it is summed, in either of two kernels."""
    found: dict[str, list[str]] = json.loads(run_forked(FAKE_GPU, PROGRAM).stdout.splitlines()[-1])
    for scale in (4, 16):
        ours, default = ([peak(code) for code in found[f"{scale} {who}"]] for who in (True, False))
        assert default[0] > 200 << 20
        assert ours[0] <= 1.001 * default[0]
        assert max(ours) <= 1.001 * max(default)
