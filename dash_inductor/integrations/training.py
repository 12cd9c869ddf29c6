"""What the callbacks of all training tools share: the settings of a deterministic training, and its first report.

The modules of the tools call `DeterministicTraining` when training begins and ends; the tools seed their generators.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import entry_points
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import _switch
from .. import arguments as _arguments
from ..doctor import flag, settings
from ..doctor.findings import Severity, run
from ..errors import FallbackError, MissingPackageError, described
from ..observers import log
from ..observers.log import Log
from ..records.records import FORWARD_ONLY, FULL, GraphRecord, SiteRecord, format_table, graphs
from ..upstream.eager import not_compiled
from . import _in_force

GROUP = "dash_inductor.training"
"""The group of entry points with functions that watch a training: of a folder and ``log_to``; context managers."""

Folder = str | os.PathLike[str]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_TOO_LATE = (
    f"{_CUBLAS} is set too late: this process has used a GPU before, and its products of matrices may not be "
    f"deterministic. Export {_CUBLAS}=:4096:8 before the program starts."
)
_COLUMNS = ("module", "status", "shape", "mask", "plan or reason", "forward", "line")
_WARN_ONLY = (
    'deterministic algorithms only warn (warn_only=True; deterministic="warn" of Lightning), which leaves operators '
    "without a deterministic implementation nondeterministic"
)


class DeterministicTraining:
    """Deterministic settings between `begin` and `end`, with a report after the first step of an optimizer.

    When it is made, `CUBLAS_WORKSPACE_CONFIG` is set for this process and those that it starts, if it is not set.

    `begin` switches PyTorch's deterministic algorithms on (if the program has them on with `warn_only`, they stay so),
    cuDNN's timing of convolutions off, and logs which other settings of this process break determinism, as
    `dash-inductor doctor` does.  After the first step of an optimizer, one message says how many attentions were
    replaced, and what was not and why.  `end` restores all settings but the environment variable and the states of
    generators.  Only the first rank logs.

    Args:
        logger: the tool's logger.
        compiled_by: the option of the tool that compiles the model.
        strict: an attention that is not replaced is a `FallbackError` when it is compiled, as `config.strict` makes it,
            and so is a first step without compiled attention.
        record: a folder for fingerprints of the training, as of `dash_guard.record`.
        guard: a folder for findings about its ranks, as of `dash_guard.guard`.
        log_to: a logger of `dash_inductor.integrations` for W&B, TensorBoard or MLflow, or another `Log`. That of the
            first rank gets the records as the table "attention" after the first step, with `record` digests of each
            step, and with `guard` findings as alerts.

    Raises:
        ArgumentError: `record` or `guard` is no path, or `log_to` is no `Log`.
        MissingPackageError: `record` or `guard` is given, and dash_guard is not installed.

    Attributes:
        is_running: whether the training has begun and has not ended.
    """

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        compiled_by: str,
        *,
        strict: bool = False,
        record: Folder | None = None,
        guard: Folder | None = None,
        log_to: Log | None = None,
    ) -> None:
        self._logger, self._compiled_by, self._strict, self._log_to = logger, compiled_by, strict, log_to
        log.check(log_to)
        folders = {"record": record, "guard": guard}
        for name, folder in folders.items():
            if folder is not None:
                _arguments.path(name, folder)
        self._watched = [(_watching(name), folder) for name, folder in folders.items() if folder is not None]
        self.is_running = False
        self._until_end, self._until_step = ExitStack(), ExitStack()
        self._before = 0  # graphs that were compiled before training
        self._alerts: dict[str, None] = {}  # operators about which PyTorch has warned, in their order
        self._is_late = not os.environ.get(_CUBLAS) and _has_used_a_gpu()
        if not os.environ.get(_CUBLAS):
            os.environ[_CUBLAS] = ":4096:8"

    def begin(self) -> None:
        """Puts the settings in force, and ends a training before it that an exception has left."""
        self.end()
        with ExitStack() as stack:
            stack.enter_context(_in_force.deterministic())
            self._tell_settings()
            if self._strict:
                stack.enter_context(_in_force.strict())
            for watching, folder in self._watched:
                stack.enter_context(watching(folder, log_to=self._log_to if is_first_rank() else None))
            self._before = len(graphs())
            self._is_first_step = True
            self._alerts.clear()
            self._until_step = stack.enter_context(ExitStack())
            self._until_step.enter_context(_in_force.alerts(self._alerts))
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            self._until_end = stack.pop_all()
            self.is_running = True

    def end(self) -> None:
        """Restores the settings, unless another training needs them; does nothing if no training has begun."""
        self.is_running = False
        self._until_end.close()

    def _tell_settings(self) -> None:
        if self._is_late:
            self._tell(logging.WARNING, _TOO_LATE)
        for finding in run(settings.CHECKS):
            level = logging.WARNING if finding.severity >= Severity.WARNING else logging.INFO
            self._tell(level, f"{finding.what}. {finding.advice}")

    @not_compiled
    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_first_step:
            return
        self._is_first_step = False
        self._until_step.close()
        if flag.Flag.now() is flag.Flag.WARN_ONLY:
            operators = f"; in the first step: {', '.join(self._alerts)}" if self._alerts else ""
            self._tell(logging.WARNING, f"{_WARN_ONLY}{operators}")
        self._report()

    def _report(self) -> None:
        new = graphs()[self._before :]
        found = new or graphs()
        kept = [site for graph in found for site in graph.sites if site.status != "replaced"]
        self._log_table([_row(site) for graph in found for site in graph.sites])
        text = _replaced(found) + (f"; kept:\n{format_table(kept)}" if kept else "")
        if not new:
            off = _switch.off_reason()
            advice = f"dash_inductor is off ({off})" if off else f"compile the model by {self._compiled_by}"
            before = f", unless it runs graphs that were compiled before: {text}" if found else ""
            text = f"no attention was compiled in the first step: {advice}{before}"
            if self._strict and (kept or not found):
                self.end()
                raise FallbackError(f"strict=True, but {text}")
        is_well = new and not kept and not any(graph.missing for graph in new)
        self._tell(logging.INFO if is_well else logging.WARNING, text)

    def _log_table(self, rows: list[tuple[str, ...]]) -> None:
        if self._log_to is None or not is_first_rank():
            return
        try:
            self._log_to.table("attention", _COLUMNS, rows)
        except Exception as error:  # of a logger: training goes on
            self._tell(logging.WARNING, f"the records are not logged: {described(error)}")

    def _tell(self, level: int, message: str) -> None:
        if is_first_rank():
            self._logger.log(level, "dash_inductor: %s", message)


_SHARED = "    strict, record, guard, log_to: as of `DeterministicTraining`, which also says what is raised."

Tool = TypeVar("Tool", bound=type[Any])


def with_shared_arguments(tool: Tool) -> Tool:
    """A class decorator: in a docstring, puts what `DeterministicTraining` says of its arguments in the place of the
    line that refers to it.
    """
    if tool.__doc__ and DeterministicTraining.__doc__:  # there are none under `python -OO`
        text = inspect.cleandoc(DeterministicTraining.__doc__)
        shared = text[text.index("    strict:") : text.index("\n\nAttributes:")]
        tool.__doc__ = inspect.cleandoc(tool.__doc__).replace(_SHARED, shared)
    return tool


def is_first_rank() -> bool:
    """Whether this process is rank 0, or has no rank: by the process group, or before there is one by the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _watching(name: str) -> Callable[..., AbstractContextManager[Any]]:
    for point in entry_points(group=GROUP, name=name):
        found: Callable[..., AbstractContextManager[Any]] = point.load()
        return found
    raise MissingPackageError("dash-guard", "record and guard", "guard")


def _has_used_a_gpu() -> bool:
    """Whether this process has, or had, tensors on a GPU: before, cuBLAS cannot have read its variable."""
    if not torch.cuda.is_initialized():
        return False
    try:
        return any(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    except RuntimeError:  # allocators of programs need not count
        return True


def _replaced(found: Iterable[GraphRecord]) -> str:
    """How many attentions were replaced: ``4 of 5 attentions replaced``, and apart from these, those of evaluations."""
    sites = [site for graph in found for site in graph.sites]
    with_backward, without = ([site for site in sites if site.kind == kind] for kind in (FULL, FORWARD_ONLY))
    texts = [_counted(with_backward, "attentions")] if with_backward or not without else []
    texts += [_counted(without, "attentions without a backward")] if without else []
    missing = sum(graph.missing for graph in found)
    return ", ".join(texts) + (f"; {missing} graphs from a cache have no records" if missing else "")


def _row(site: SiteRecord) -> tuple[str, ...]:
    decision = site.reason.value if site.reason else str(site.plan)
    return site.module, site.status, site.shape, site.mask, decision, site.forward, site.line


def _counted(sites: list[SiteRecord], name: str) -> str:
    return f"{sum(site.status == 'replaced' for site in sites)} of {len(sites)} {name} replaced"
