"""Whether dash_inductor is inactive in this process, and why: what the hook in `import torch` and the package share.

A module of its own beside the package, standard library only, because Python would otherwise run
`dash_inductor/__init__.py` while torch is being imported.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping

BOOLEANS: Mapping[str, bool] = {
    "0": False, "1": True, "false": False, "true": True, "no": False, "yes": True, "off": False, "on": True,
}  # fmt: skip
"""The spellings of a boolean in the environment; upper case is allowed too."""

failure: str | None = None  # why dash_inductor is inactive for the rest of this process


def off_by_environment() -> bool:
    """Whether DASH_INDUCTOR=0 (or another spelling of it) is set: Inductor is left alone, whatever the program asks."""
    return BOOLEANS.get(os.environ.get("DASH_INDUCTOR", "").lower()) is False


def strict_by_environment() -> bool:
    """Whether DASH_INDUCTOR_STRICT asks for errors; a value that nobody understands may have meant that."""
    text = os.environ.get("DASH_INDUCTOR_STRICT", "")
    return BOOLEANS.get(text.lower(), bool(text))


def give_up(error: BaseException) -> None:
    """Stay inactive for the rest of this process and say why, once: now, or with `strict` at every compile."""
    global failure
    if failure is not None:
        return
    failure = f"{type(error).__name__}: {error}"
    logging.getLogger("dash_inductor").debug("inactive", exc_info=error)
    if strict_by_environment():
        return
    text = f"dash_inductor is inactive, attention is compiled as plain PyTorch compiles it. {failure}"
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except Warning:  # warnings are errors in this process, but this one must not break an import
        print(f"warning: {text}", file=sys.stderr)
