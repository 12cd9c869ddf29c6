"""Predicted times of plans at sites, in microseconds, as the families of their kernels know them (`Family.times`)."""

from __future__ import annotations

from ..errors import ArgumentError
from ..kernels.families import FAMILIES, family
from ..kernels.family import Documents
from ..model.plan import Plan
from ..model.site import BITS, Site

GPU = "H200"
"""The GPU for which predictions are made unless another one is named.  Those for sm_90 are made for it on an H100 too,
where nothing has been measured.
"""


def predicted_us(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> float | None:
    """Predicted time of the backward that `plan` runs at `site`, in microseconds, from saved tensors to gradients.

    Dynamic lengths and batches count as the planner's nominal ones.  Valid keys and a dense mask are supposed to hide
    nothing, but for a dense mask that comes without a band, which is supposed to be causal.

    Args:
        arch: as for `planner.plan`.
        gpu: a GPU of this architecture that has been measured, one of `gpus`.
        documents: where the mask has segments, the lengths of the documents in a batch element, which is the same for
            all; the predicted time is None without them.

    Returns:
        None where nothing is known; `unknown` says why.

    Raises:
        ArgumentError: a GPU that has not been measured, or documents that are not those of the site.
    """
    if unknown(plan, site, arch, gpu, documents) is not None:
        return None
    return family(plan.kernel).predicted_us(plan, site, gpu, documents)


def predicted_forward_us(plan: Plan, site: Site, arch: str, gpu: str = GPU) -> float | None:
    """`predicted_us` for the forward."""
    _check_gpu(gpu)
    return None if plan.forward_tiles is None else family(plan.forward).predicted_forward_us(plan, site, arch, gpu)


def unknown(plan: Plan, site: Site, arch: str, gpu: str = GPU, documents: Documents | None = None) -> str | None:
    """Why there is no prediction of the backward, in words; None where there is one.  Arguments as `predicted_us`."""
    _check_gpu(gpu)
    if documents is not None:
        _check_documents(site, documents)
    if not any(each.times and each.runs_on(arch, bits) for each in FAMILIES for bits in BITS.values()):
        return f"{arch} is not calibrated"
    return family(plan.kernel).unpredicted(plan, site, arch, gpu, documents)


def gpus() -> list[str]:
    """The GPUs on which kernels have been timed."""
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
