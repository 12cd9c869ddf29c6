"""The command line arguments that describe a site (one attention), such as its shape and mask."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from dataclasses import dataclass

from ..errors import ArgumentError
from ..model.architectures import ARCHS, GPUS, architecture
from ..model.attention_spec import AttentionSpec
from ..model.components import COMPONENTS, Component, Operand, Segments
from ..model.dropout import Dropout
from ..model.mask import MAX_LENGTH, Anchor, Band, Mask
from ..model.operands import Bias
from ..model.relations import POSITION
from ..model.site import BITS, Site, dtype_named
from ..planning.prediction import GPU, gpus, is_measured
from ..timeline.lengths import Lengths

MASKS = """\
components joined by '+'.  One of
  full, causal, window:LO,HI    query i sees key j if LO <= i - j <= HI; 'none' is no bound;
                                ':bottom_right' behind any of them aligns the last query with the last key
and any of
  keys, keys:N,N,...            padding: a mask of valid keys; the first N are valid in each batch element
  documents, documents:N,N,...  packed documents; their lengths
  interval                      a first and a last key for each query
  head_interval                 the same for each query of each head
  dense                         a tensor with a truth value for each query and key"""

_WINDOW = re.compile(r"window:(none|-?\d+),(none|-?\d+)")
_DATA = re.compile(r"(keys|documents)(?::(\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class Request:
    """A site (one attention) to be planned, with the device to plan it for.

    Args:
        site: the site.
        device: the device that was asked for: a GPU such as "H100", or an architecture.
        arch: its architecture, for example "sm_90".
        gpu: the GPU of the measurements behind predicted times, one of `prediction.gpus`; None without any.
        data: the document lengths or numbers of valid keys that define a data-dependent mask; None if not given.
    """

    site: Site
    device: str
    arch: str
    gpu: str | None
    data: Lengths | None

    @property
    def documents(self) -> tuple[int, ...] | None:
        """The lengths of the packed documents, if they were given."""
        return None if self.data is None else self.data.documents


class _WrappedLines(argparse.HelpFormatter):
    """Wraps each line of a help text by itself; what follows a line stays in the column of its last part."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        found: list[str] = []
        for line in text.splitlines():
            (prefix,) = re.findall(r"^\s*(?:\S+(?: \S+)*  +)?", line)
            indent = " " * min(len(prefix), width // 2)
            found += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False)
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command line arguments that describe a site, as the function `request` reads them."""
    parser.formatter_class = _WrappedLines
    parser.add_argument(
        "--shape", required=True, metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]",
        help="batch, query heads, kv heads, queries, keys, head dims of q and k, and of v",
    )  # fmt: skip
    parser.add_argument("--mask", default="causal", help=MASKS)
    parser.add_argument("--arch", default="h100", help=f"the device to plan for: {ARCHS}")
    parser.add_argument("--dtype", default="bfloat16", help=f"{', '.join(BITS)}, or short: bf16, fp16, fp32")
    parser.add_argument("--dropout", type=float, metavar="P", help="the probability with which dropout drops")
    parser.add_argument("--bias", action="store_true", help="a bias is added to the scores")
    parser.add_argument("--bias-gradient", action="store_true", help="a bias is added that needs a gradient")


def request(arguments: argparse.Namespace) -> Request:
    """Builds the `Request` that parsed command line arguments describe.

    Raises:
        ArgumentError: an argument is invalid; the message names it, its value and what is allowed.
    """
    sizes = _shape(arguments.shape)
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    arch, dtype = architecture(arguments.arch), dtype_named(arguments.dtype)
    mask, data, operands = _mask(arguments.mask)
    if data is not None:
        try:
            data.check(batch, q_len, kv_len)
        except ArgumentError as error:
            raise ArgumentError("mask", arguments.mask, f"{error.name}: {error.allowed}") from error
    bias = dropout = None
    if arguments.bias or arguments.bias_gradient:
        bias, operands = Bias(Operand(operands), arguments.bias_gradient), operands + 1
    if arguments.dropout is not None:
        if not 0 < arguments.dropout < 1:
            raise ArgumentError("dropout", arguments.dropout, "a number greater than 0 and less than 1")
        dropout = Dropout(arguments.dropout, Operand(operands))
    spec = AttentionSpec(mask, 1 / math.sqrt(head_dim), bias=bias, dropout=dropout)
    site = Site(
        "cpu" if arch == "cpu" else "cuda", dtype, batch, q_heads, kv_heads, q_len, kv_len, head_dim,
        value_dim, spec,
    )  # fmt: skip
    device = arguments.arch.upper() if arguments.arch.lower() in GPUS else arch
    gpu = (device if device in gpus() else GPU) if is_measured(arch) else None
    return Request(site, device, arch, gpu, data)


def _shape(text: str) -> tuple[int, int, int, int, int, int, int]:
    allowed = f"six or seven numbers from 1 to {MAX_LENGTH}: B,Hq,Hkv,Sq,Skv,D[,Dv], where Hq is a multiple of Hkv"
    if not re.fullmatch(r"\d{1,19}(,\d{1,19}){5,6}", text):
        raise ArgumentError("shape", text, allowed)
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1 or max(numbers) > MAX_LENGTH or numbers[1] % numbers[2]:
        raise ArgumentError("shape", text, allowed)
    batch, q_heads, kv_heads, q_len, kv_len, head_dim = numbers[:6]
    return batch, q_heads, kv_heads, q_len, kv_len, head_dim, numbers[6] if len(numbers) > 6 else head_dim


def _mask(text: str) -> tuple[Mask, Lengths | None, int]:
    """Parses a mask; returns it, the given lengths of its data, and the number of tensors that it reads."""
    band, found, operands = None, dict[str, Component](), 0
    lengths: dict[str, tuple[int, ...]] = {}
    for component in (word.strip() for word in text.split("+")):
        data = _DATA.fullmatch(component)
        name = component if data is None else "segments" if data[1] == "documents" else data[1]
        if name in COMPONENTS and name not in found and (data is not None or name != "segments"):
            found[name], operands = _component(COMPONENTS[name], operands)
            if data is not None and data[2]:
                lengths[data[1]] = tuple(int(word) for word in data[2].split(","))
        elif data is None and name not in COMPONENTS and band is None:
            band = _band(component, text)
        else:
            raise ArgumentError("mask", text, f"every kind of component once: {MASKS}")
    hidden = Lengths(lengths.get("documents"), lengths.get("keys")) if lengths else None
    return Mask(band or Band(), *found.values()), hidden, operands


def _component(kind: type[Component], first: int) -> tuple[Component, int]:
    """Makes a mask component with operands numbered from `first`, and returns it with the next free number.

    Segments use one vector for queries and keys; key numbers that a component may omit default to positions.
    """
    if kind is Segments:
        return Segments(Operand(first), Operand(first)), first + 1
    needed = {
        name: not (kind.OPTIONAL and kind.RELATION.missing.get(role) == POSITION) for name, role in kind.ROLES.items()
    }
    places = iter(range(first, first + sum(needed.values())))
    operands = {name: Operand(next(places)) if needs else None for name, needs in needed.items()}
    return kind(**operands), first + sum(needed.values())


def _band(component: str, text: str) -> Band:
    word = component.removesuffix(":bottom_right")
    anchor: Anchor = "top_left" if word == component else "bottom_right"
    window = _WINDOW.fullmatch(word)
    if window is not None:
        lo, hi = (None if bound == "none" else int(bound) for bound in window.groups())
        if lo is not None and hi is not None and lo > hi:
            raise ArgumentError("mask", text, "window:LO,HI where LO <= HI")
        return Band(lo, hi, anchor)
    if word not in ("full", "causal"):
        raise ArgumentError("mask", text, MASKS)
    return Band(0 if word == "causal" else None, None, anchor)
