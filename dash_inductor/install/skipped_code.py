"""Records attention that a compiled function calls but Dynamo does not trace.

Such a call breaks the graph and runs outside of all graphs, so that no pass sees it.  Without a record, `strict` would
pass.  There are two kinds: functions under `torch.compiler.disable`, and autograd functions in which Dynamo comes to
something that it cannot trace, such as the compiler of FlashAttention-4, or an operator without a shape function, as
`kernels-community/vllm-flash-attn3` has them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ..config import config
from ..errors import FallbackError
from ..upstream import dynamo, seams

_ATTENTION = re.compile(
    r"flash_?attn|flash_?attention|(attn|attention|mha)(_?(fn|func|function|forward|fwd|op|kernel|varlen\w*|with\w*))?$",
    re.IGNORECASE,
)
"""Names of functions and classes that compute attention; not those of masks and settings."""

_LIBRARY = re.compile(r"flash_?(attn|attention)", re.IGNORECASE)
"""Names of modules that only hand a call on to attention, or compute it."""

_OWN = ("torch", "dash_inductor")
"""Packages whose skipped functions compute no attention themselves."""


def install(active: Callable[[], bool]) -> None:
    """Records skipped functions with attention, in what is traced while `active()` is true."""
    seams.CALL_SKIPPED.wrap(lambda plain: _of_functions(plain, active), let_through=FallbackError)
    seams.INLINE.wrap(lambda plain: _of_methods(plain, active), let_through=FallbackError)
    seams.APPLY.wrap(lambda plain: _of_autograd_functions(plain, active), let_through=FallbackError)


def _of_functions(call: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    def call_and_record(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if active():
            _look_at(tx, self.value, args, kwargs)
        return call(self, tx, args, kwargs)

    return call_and_record


def _of_methods(inline: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    def inline_and_record(parent: Any, function: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        if active() and isinstance(function, dynamo.UserFunctionVariable):
            _look_at(parent, function.get_function(), args, kwargs)
        return inline(parent, function, args, kwargs, *more, **named)

    return inline_and_record


def _of_autograd_functions(apply: Callable[..., Any], active: Callable[[], bool]) -> Callable[..., Any]:
    def apply_and_record(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            return apply(self, tx, args, kwargs)
        except dynamo.Unsupported as error:
            computed = computes_attention(self.fn_cls) if active() else ""
            if computed and not _is_left_to_the_cpu((*args, *kwargs.values())):
                _record(tx, self.fn_cls, computed, f"breaks the graph: {_cause(error)}")
            raise

    return apply_and_record


def _cause(error: Exception) -> str:
    """The first line of a graph break, with what Dynamo calls its context."""
    first, _, rest = str(error).partition("\n")
    context = re.search(r"Developer debug context: (.*)", rest)
    return f"{first} ({context[1]})" if context and context[1] else first


def _look_at(tx: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Records a call if Dynamo is about to skip it and it computes attention."""
    if not inspect.getattr_static(function, "_torchdynamo_disable", False):
        return
    computed = computes_attention(function)
    if computed and not _is_left_to_the_cpu((*args, *kwargs.values())):
        _record(tx, function, computed, "is under torch.compiler.disable")


def computes_attention(function: Any) -> str:
    """Returns the name by which a function is known to compute attention: its own, or that of what it calls; else "".

    Args:
        function: a function, what `torch.compiler.disable` has made of it, or the class of an autograd function, of
            which packages with attention have others, too: the name of its module does not count.
    """
    function = _original(function)
    module = str(getattr(function, "__module__", ""))
    if module.partition(".")[0] in _OWN:
        return ""
    own = str(getattr(function, "__qualname__", ""))
    name = f"{module}.{own}"
    if any(map(_ATTENTION.search, (own if inspect.isclass(function) else name).split("."))):
        return name
    return next(filter(_ATTENTION.search, _called(function)), "")


def _original(function: Any) -> Any:
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    return function


def _called(function: Any) -> Iterator[str]:
    """Yields the names of the functions that a function calls; without source, all names that its code reads."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        yield from getattr(getattr(function, "__code__", None), "co_names", ())
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            yield called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _is_left_to_the_cpu(args: tuple[Any, ...]) -> bool:
    """Whether all tensors of a call are on the CPU, where nothing is replaced by default."""
    found = [arg.realize() for arg in args]
    devices = {str(arg.device).partition(":")[0] for arg in found if isinstance(arg, dynamo.TensorVariable)}
    return devices == {"cpu"} and config.cpu == "off"


def _record(tx: Any, function: Any, computed: str, cause: str) -> None:
    """Publishes the record of a call that is not traced; one for each function and line.

    Raises:
        FallbackError: `config.strict` is set.
    """
    from ..model.reasons import Reason
    from ..passes.base.fallback_error import fallback_error
    from ..records.publication import publish
    from ..records.records import SiteRecord, sites

    own = _original(function)
    name = str(getattr(own, "__qualname__", own))
    by = "" if computed.endswith(name) else f", which calls {computed}"
    line, is_known = _line(tx)
    record = SiteRecord(
        name=re.sub(r"\W+", "_", name).strip("_"),
        op=f"{name} (not traced)",
        status="fallback",
        reason=Reason.SKIPPED,
        detail=f"{getattr(own, '__module__', '')}.{name}{by}, {cause}",
        site=None,
        plan=None,
        forward="not replaced",
        mask="",
        line=line,
    )
    # Dynamo comes to a call again in each function around it, and has seen its line in the outermost one.
    before = [site for site in sites() if site.reason is Reason.SKIPPED and site.detail == record.detail]
    if not any(site.line == line or not is_known for site in before):
        publish([record], "")
    if config.strict:
        raise fallback_error(f"dash_inductor did not replace an attention: {record}")


def _line(tx: Any) -> tuple[str, bool]:
    """The innermost line outside of modules that hand a call on, and whether there is one in what is compiled now."""
    while (handed_on := _LIBRARY.search(str(tx.f_globals.get("__name__", "")))) and getattr(tx, "parent", None):
        tx = tx.parent
    return f"{tx.f_code.co_filename}:{tx.lineno}", not handed_on
