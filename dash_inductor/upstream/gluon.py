"""Gluon's internals: its sources, the classes of device values, and functions that build IR themselves."""

from triton._C.libtriton import ir
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value
from triton.runtime.jit import ConstexprFunction

__all__ = ["ConstexprFunction", "GluonASTSource", "aggregate", "base_value", "builtin", "ir"]
