"""Names of templates: Inductor knows a template by its name, so that two texts must not share one."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from dash_inductor.kernels.portable import templates
from dash_inductor.model import AttentionSpec, Band, Bias, Dense, Dropout, Keys, Mask, Operand, Segments, Traits
from dash_inductor.schedule import supports

from ..support.varlen_layout import mask_of

BANDS = [Band(), Band(hi=0), Band(lo=-100), Band(-100, 0)]


def calls() -> list[AttentionSpec]:
    """Calls with every combination of what decides the text of a kernel."""
    ids, valid, pairs = Segments(Operand(0), Operand(1)), Keys(Operand(2)), Dense(Operand(3))
    masks = [
        Mask(band, keys, segments, dense)
        for band, keys, segments, dense in itertools.product(BANDS, (None, valid), (None, ids), (None, pairs))
    ]
    masks += [mask_of(band) for band in BANDS]
    extras = itertools.product((None, Bias(Operand(4))), (None, Dropout(0.1, Operand(5))))
    return [
        AttentionSpec(mask, 0.125, bias=bias, dropout=dropout)
        for (bias, dropout), mask in itertools.product(extras, masks)
    ]


@pytest.mark.parametrize("kernel", ["forward", "dq", "dq_bias", "dbias", "dkdv:two_pass", "dkdv:spt", "dkdv:bent_fold"])
def test_one_name_has_one_text(kernel: str) -> None:
    texts = defaultdict(set)
    for spec in calls():
        if not kernel.startswith("dkdv:") or supports(kernel.split(":")[1], spec.mask.band) is None:
            texts[str(spec.traits)].add(text(kernel, spec.traits))
    assert len(texts) > len(BANDS)
    assert [name for name, found in texts.items() if len(found) > 1] == []


def text(kernel: str, traits: Traits) -> str:
    """The template that a kernel of such calls is made from."""
    if kernel.startswith("dkdv:"):
        return templates.dkdv_template(kernel.split(":")[1], traits)
    if kernel == "dq_bias":
        return templates.dq_bias_template(traits, adds=True)
    found = {
        "forward": templates.forward_template, "dq": templates.dq_template, "dbias": templates.bias_gradient_template
    }  # fmt: skip
    return found[kernel](traits)
