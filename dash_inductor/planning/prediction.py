"""Predicted times of plans, in microseconds, from the measured step times of their kernel families (`Family.times`)."""

from __future__ import annotations

from ..errors import ArgumentError
from ..kernels.families import FAMILIES, family
from ..kernels.family import Documents
from ..model.plan import Plan
from ..model.site import BITS, Site

GPU = "H200"
"""The default GPU of predictions.  It also stands for the H100 (sm_90 as well), on which no step times were measured.
"""


def predicted_us(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> float | None:
    """Predicted time of a backward in microseconds, from saved tensors to gradients.

    Dynamic lengths and batch sizes are replaced by the nominal ones.  Key validity and dense masks are assumed to hide
    nothing; a dense mask without a band is assumed to be causal.

    Args:
        plan, site: the plan, and the site at which it runs.
        arch: as for `planner.plan`.
        gpu: a measured GPU of this architecture, one of `gpus()`.
        documents: the document lengths of each batch element, for masks with segments; without them the prediction is
            None.

    Returns:
        The time; None if there is no prediction (see `unknown` for the reason).

    Raises:
        ArgumentError: the GPU has not been measured, or the documents do not fit the site.
    """
    if unknown(plan, site, arch, gpu, documents) is not None:
        return None
    return family(plan.kernel).predicted_us(plan, site, gpu, documents)


def predicted_forward_us(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> float | None:
    """Predicted time of the plan's forward in microseconds, as `predicted_us`; None if the graph keeps its forward."""
    _check_gpu(gpu)
    return None if plan.forward_tiles is None else family(plan.forward).predicted_forward_us(plan, site, arch, gpu)


def unknown(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> str | None:
    """Why there is no prediction of the backward, in words; None if there is one.  Arguments as for `predicted_us`."""
    _check_gpu(gpu)
    if documents is not None:
        _check_documents(site, documents)
    if not is_measured(arch):
        return f"{arch} is not calibrated"
    return family(plan.kernel).unpredicted(plan, site, arch, gpu, documents)


def is_measured(arch: str) -> bool:
    """Whether the kernels of some family have been measured on a GPU of an architecture."""
    return any(each.times and each.runs_on(arch, bits) for each in FAMILIES for bits in BITS.values())


def gpus() -> list[str]:
    """The names of the GPUs on which kernels have been measured."""
    return list(dict.fromkeys(gpu for each in FAMILIES for gpu in each.times))


def _check_gpu(gpu: str) -> None:
    if gpu not in gpus():
        raise ArgumentError("gpu", gpu, gpus())


def _check_documents(site: Site, documents: Documents) -> None:
    if site.mask.segments is None:
        raise ArgumentError("documents", documents, "None for a mask without segments")
    if min(documents, default=0) < 1:
        raise ArgumentError("documents", documents, "one length at least, and none below 1")
    for name, length in (("q_len", site.q_len), ("kv_len", site.kv_len)):
        if length is not None and length != sum(documents):
            raise ArgumentError("documents", documents, f"lengths whose sum is {name}={length}")
