"""Predicted times of plans at sites, in microseconds."""

from __future__ import annotations

from ..model.plan import Plan
from ..model.site import Site
from . import costs
from .families import HOPPER


def predicted_us(plan: Plan, site: Site, arch: str) -> float | None:
    """Predicted time of the backward that `plan` runs at `site`, in microseconds, from saved tensors to gradients.

    Dynamic lengths and batches count as the planner's nominal ones.

    Returns:
        None where no measurement says how long the kernels take: other kernels than those of `HOPPER`, and other
        architectures than sm_90, are not calibrated.
    """
    if arch != "sm_90" or plan.kernel != HOPPER.name:
        return None
    batch = site.batch or costs.NOMINAL_BATCH
    q_len, kv_len = site.q_len or costs.NOMINAL_LEN, site.kv_len or costs.NOMINAL_LEN
    n_q, n_kv = -(-q_len // plan.dkdv.block_q), -(-kv_len // plan.dkdv.block_kv)
    visible = 1.0 if site.band.is_full else 0.5
    step = (
        5.0 * (site.head_dim + site.value_dim) * plan.dkdv.block_q * plan.dkdv.block_kv / (600e6 / costs.WORKERS[arch])
    )
    return 85.0 + batch * site.q_heads * n_kv * (visible * n_q + 4) * step / costs.WORKERS[arch]
