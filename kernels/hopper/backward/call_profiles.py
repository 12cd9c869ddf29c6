"""The host side of profiling a backward: allocates the buffer for a launch's timestamps, and describes the call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....model.attention_spec import AttentionSpec
from ....model.plan import Plan
from ....model.site import Site
from ....records import profiles
from ....schedule.tile_schedule import ClosedForm

NOTHING: tuple[int, int] = 0, 0
"""The timestamp arguments of a stamped kernel whose call is not profiled: no head is stamped."""


class CallProfiles(NamedTuple):
    """What the profiles of all calls with one launcher have in common; `begin` begins the profile of a call.

    Attributes:
        key: distinguishes sites with the same name.
        heads: number of query heads of all batch elements.
        kv_tiles, q_tiles: number of tiles of a head.
        meta: description of the call that a profile stores.
    """

    key: tuple[AttentionSpec, Plan, tuple[int, ...]]
    heads: int
    kv_tiles: int
    q_tiles: int
    meta: dict[str, Any]

    @staticmethod
    def of(
        spec: AttentionSpec, plan: Plan, site: Site, tile_schedule: ClosedForm, device: torch.device
    ) -> CallProfiles:
        """Returns the `CallProfiles` of calls with this spec, plan, site and device.

        Args:
            site: the attention site of the call.
            tile_schedule: the tile schedule, over query heads.
        """
        p, properties = tile_schedule.problem, torch.cuda.get_device_properties(device)
        sizes = p.batch, p.heads, site.kv_heads, p.q_len, p.kv_len, site.head_dim, site.value_dim
        names = "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"
        meta = {
            "kernel": plan.kernel,
            "plan": str(plan),
            "schedule": plan.schedule,
            "spec": str(spec),
            "mask": str(spec.mask),
            "dtype": site.dtype,
            "shape": dict(zip(names, sizes, strict=True)),
            "tiles": {"q": p.block_q, "kv": p.block_kv},
            "work_ids": tile_schedule.work_ids,
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
        }
        return CallProfiles((spec, plan, sizes), p.batch * p.heads, p.n_kv, p.n_q, meta)

    def begin(self, site: str, device: torch.device) -> profiles.ProfileRun | None:
        """Begins the profile of one call; returns None if this call is not profiled.

        Args:
            site: the name of the site, see `profiles.begin`.
            device: the device on which the kernels run.
        """
        return profiles.begin(site, self.key, self.heads, self.kv_tiles, self.q_tiles, device, self.meta)
