"""A list of libraries with their own attention; graphs contain it only if a compiled function calls its operators."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from .findings import Seen, Severity

_SDPA = (
    "F.scaled_dot_product_attention, which takes q.transpose(1, 2) where a library has [batch, length, heads, head dim]"
)


@dataclass(frozen=True)
class Library:
    """A library with its own attention, and what is known of that attention when it runs outside of graphs.

    Attributes:
        module: a regular expression that matches the beginning of its modules' names.
        known: whether its backward is deterministic, a sentence.
        advice: how to change a call.
        layers: the names of its `torch.nn.Module` classes that contain attention.
        package: the name by which it is imported; "" if another entry has it.
    """

    module: str
    known: str
    advice: str
    layers: frozenset[str] = frozenset()
    package: str = ""


_FLASH = "Its backward adds in no fixed order, unless it is given deterministic=True."

_IN_TRANSFORMERS = (
    'In transformers, attn_implementation="dash_inductor" takes the place of names of flash-attn and of the kernels '
    "hub, after dash_inductor.register()."
)

TRANSFORMER_ENGINE = Library(
    r"transformer_engine\b",
    "Its backward is deterministic only if NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 was set or, in newer versions, if "
    "deterministic algorithms were on when the module was made.",
    f"Dynamo never compiles it. Set the flag before the model is made; or call {_SDPA}, in what is compiled.",
    frozenset({"DotProductAttention", "MultiheadAttention", "TransformerLayer"}),
    "transformer_engine",
)

LIBRARIES = (
    TRANSFORMER_ENGINE,
    Library(
        r"flash_attn\.cute\b|\w*flash_?attn_?(4|cute)|\w*vllm_flash_attn3",
        _FLASH,
        "Dynamo cannot trace it: give it deterministic=True, or call the functions of the same names in "
        f"dash_inductor.integrations.flash_attn. {_IN_TRANSFORMERS}",
    ),
    Library(
        r"\w*flash_?attn",
        _FLASH,
        "Call it in what is compiled, where it is replaced; deterministic=True makes it deterministic where it is. "
        f"{_IN_TRANSFORMERS}",
        package="flash_attn",
    ),
    Library(
        r"xformers\b",
        "Whether its backward is deterministic depends on the kernel that it chooses.",
        f"Call {_SDPA}, in what is compiled.",
        package="xformers",
    ),
)
"""The known libraries; the first that matches applies.  Names in the kernels hub have a prefix or a hash."""

UNKNOWN = Library("", "Whether its backward is deterministic is not known.", f"Call {_SDPA}, in what is compiled.")
"""The entry for autograd functions of programs and of other libraries."""

PACKAGES = (*(library.package for library in LIBRARIES if library.package), "flash_attn_interface", "sageattention")
"""The import names of libraries with their own attention."""

_ATTENTION = re.compile("attn|attention|mha$", re.IGNORECASE)


@functools.cache
def library_of(module: str) -> Library | None:
    """The library to which a Python module belongs, given the module's name; None if it belongs to none of them."""
    return next((library for library in LIBRARIES if re.match(library.module, module)), None)


def is_attention(function: type) -> bool:
    """Whether a `torch.autograd.Function` class computes attention, judged by its name."""
    return bool(_ATTENTION.search(function.__name__))


def is_layer(layer: type) -> bool:
    """Whether a module class contains attention of one of `LIBRARIES`."""
    library = library_of(layer.__module__)
    return library is not None and layer.__name__ in library.layers


def attention_libraries() -> Iterator[Seen]:
    """Reports which libraries with their own attention are installed."""
    found = [name for name in dict.fromkeys(PACKAGES) if find_spec(name) is not None]
    if not found:
        yield Severity.OK, "no library with attention of its own is installed", ""
        return
    what = f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} installed: what is called outside of graphs"
    advice = "dash-inductor doctor train.py runs a program, and names the lines of such calls."
    yield Severity.NOTE, f"{what} stays as it is, and has no record", advice
