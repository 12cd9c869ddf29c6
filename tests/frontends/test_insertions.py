"""One foreign operator at one edge of an accepted form: its numbers are the program's, or the attention is not
replaced.
"""

from __future__ import annotations

import os

import pytest

from .inserted_forms import FORMS
from .insertions import ROUNDING, Case, outcome, run, sample

pytestmark = pytest.mark.usefixtures("deterministic")

CASES = int(os.environ.get("DASH_FUZZ_CASES", "160"))
"""Programs of a run; ``python -m tests.frontends.insertions --cases 20000`` runs more and prints as it goes."""

KINDS = {
    "gradient that a detach stops": Case("flex", "score", "detach", "all"),
    "gradient of a bias that is half detached": Case("flex", "bias", "half detached", "all"),
    "derivative of an autograd function, of the score": Case("flex capped", "factor", "doubled gradient", "all"),
    "derivative of an autograd function, of a bias": Case("flex", "bias", "own derivative", "all"),
    "gradient without a forward": Case("flex hidden", "sum", "no_grad", "all"),
    "factor in a dtype that does not hold it": Case("plain", "scaled", "times 2.7 of torch.int64 []", "all"),
    "factor of FlexAttention in such a dtype": Case("flex", "factor", "times 2.7 of torch.int8 []", "all"),
    "rounding of probabilities to float8": Case("plain", "weights", "to torch.float8_e5m2", "none"),
    "rounding of scores of FlexAttention": Case("flex", "sum", "to torch.float16", "all"),
    "rounding of an output": Case("plain", "output", "to torch.float8_e4m3fn", "none"),
    "bits of another dtype": Case("plain", "scaled", "bits", "none"),
    "rows with the scores of another product": Case("plain", "scaled", "rows of the transposed", "none"),
    "rows with the scores of other heads": Case("biased", "scaled", "rows of the swapped", "value"),
    "maximum that is subtracted inside a softcap": Case("capped", "product", "less its maximum", "all"),
    "maximum that is subtracted before a sink": Case("sink", "scaled", "less its own maximum, detached", "none"),
    "gradient of a bias in other dimensions": Case("biased", "scores", "transposed in its shape", "bias"),
    "gradient of a sink in other dimensions": Case("sink", "sink", "batch and heads swapped", "bias"),
    "numbers of a mask that wrap": Case("window in by hand", "rows", "to torch.int8 and back", "all"),
    "numbers of a mask that are rounded": Case("causal in flex", "columns", "to torch.bfloat16 and back", "all"),
}
"""Programs that were read wrongly once, one of each kind."""


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    found = outcome(KINDS[name])
    assert found.kind in ("replaced", "fallback", "both wrong"), found


def test_a_sample() -> None:
    kinds, wrong = run(sample(CASES, seed=0))
    assert not wrong, "\n".join(f"{case}: {detail}" for case, detail in wrong)
    assert kinds["replaced"] >= 0.4 * CASES, kinds  # a reader that keeps everything proves nothing
    assert kinds["fallback"] >= 0.1 * CASES, kinds


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", FORMS)
def test_forms_alone_are_replaced(name: str, dtype: str) -> None:
    edge = FORMS[name].edges[0]
    found = outcome(Case(name, edge, "clone", "all", dtype))
    assert found.kind == "replaced", found


BY_HAND = [(name, edge) for name, form in FORMS.items() if form.reference is None for edge in form.edges]


@pytest.mark.parametrize(("name", "edge"), [(n, e) for n, e in BY_HAND if "plus 0" in FORMS[n].inserted(e)])
def test_zero_may_be_added(name: str, edge: str) -> None:
    """A model writes it in place of a term that it leaves out, as XLNet does without segments."""
    found = outcome(Case(name, edge, "plus 0", "all"))
    assert found.kind == "replaced", found
