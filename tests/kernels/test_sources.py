"""Nobody edits a kernel and forgets the numerics version."""

from __future__ import annotations

import json

from dash_inductor.planning import numerics

from ..support.distribution import ROOT
from ..support.kernel_sources import code, sources

GOLDEN = ROOT / "tests/golden/kernel_sources.json"
ADVICE = "raise planning.numerics.NUMERICS_VERSION if bits can change, then run python -m tests.support.kernel_sources"


def test_sources_are_those_of_the_numerics_version() -> None:
    golden = json.loads(GOLDEN.read_text())
    now = sources()
    assert golden["numerics_version"] == numerics.NUMERICS_VERSION, ADVICE
    changed = [name for name in now.keys() | golden["sources"] if now.get(name) != golden["sources"].get(name)]
    assert not changed, f"{', '.join(sorted(changed))}: {ADVICE}"


def test_only_code_counts() -> None:
    text = '"""Doc."""\n\nx = 1  # why\n\n\ndef f():\n    """Doc."""\n    return "#" + "x"\n'
    assert code(text) == 'x = 1\ndef f():\n    return "#" + "x"'
    assert code(text.replace("why", "because")) == code(text)
    assert code(text.replace("1", "2")) != code(text)
