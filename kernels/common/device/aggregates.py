"""Triton aggregates whose constructors are generated from annotated fields, like dataclasses.

Annotated fields are the constructor's parameters, in order.  A field with a value in the class has that value as its
default, as a compile-time constant.
"""

import inspect
import linecache

from triton.experimental.gluon import language as gl

from ....upstream.gluon import ConstexprFunction, base_value, builtin
from ....upstream.gluon import aggregate as aggregate_of_triton

group = gl.tuple | gl.constexpr
"""The type of a field that is a group of arguments, or None where the kernel has none."""


class _Constructor(ConstexprFunction):
    """A constructor that stores values as they are, and wraps plain Python values as compile-time constants.

    It has retrievable source, so Triton's cache key changes with the fields.
    """

    def __call__(self, *arguments, **named):
        self.fn(*map(_wrapped, arguments), **{name: _wrapped(value) for name, value in named.items()})


def _wrapped(value):
    return value if isinstance(value, base_value) else gl.constexpr(value)


def aggregate(cls):
    """Turns a class of annotated fields and methods into a Triton aggregate with a generated constructor."""
    fields = inspect.get_annotations(cls)
    defaults = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}
    parameters = ", ".join(f"{name}={defaults[name]!r}" if name in defaults else name for name in fields)
    lines = [f"def __init__(self, {parameters}):\n", *(f"    self.{name} = {name}\n" for name in fields)]
    file = f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[file] = sum(map(len, lines)), None, lines, file
    namespace = {"__name__": cls.__module__}
    exec(compile("".join(lines), file, "exec"), namespace)
    constructor = namespace["__init__"]
    constructor.__defaults__ = tuple(map(_wrapped, defaults.values()))
    for name in defaults:
        delattr(cls, name)
    cls.__init__ = _Constructor(constructor)
    made = aggregate_of_triton(cls)
    made.fields = tuple(fields)
    return made


@builtin
def replace(instance, _semantic=None, **changes):
    """Returns a copy of a Triton aggregate whose fields have the values in `changes`, by name."""
    kept = {name: getattr(instance, name) for name in type(instance).fields if name not in changes}
    return type(instance)(**kept, **changes)
