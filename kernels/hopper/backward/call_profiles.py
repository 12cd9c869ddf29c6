"""Host side of profiling: allocates the buffer for the timestamps of a launch, and describes the call in its
profile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....model.call import Call
from ....model.plan import Plan
from ....model.site import Site
from ....records import profiles
from ....schedule.tile_schedule import ClosedForm

NOTHING: tuple[int, int] = 0, 0
"""The timestamp arguments of a stamped kernel whose call is not profiled: no head is stamped."""


class CallProfiles(NamedTuple):
    """Profiles of the calls that `launch.prepare` prepares.

    Attributes:
        key: distinguishes sites with the same name.
        heads: query heads of all batch elements.
        kv_tiles, q_tiles: tiles of a head.
        meta: description of the call that a profile stores.
    """

    key: tuple[Call, Plan, tuple[int, ...]]
    heads: int
    kv_tiles: int
    q_tiles: int
    meta: dict[str, Any]

    @staticmethod
    def of(call: Call, plan: Plan, site: Site, tile_schedule: ClosedForm, device: torch.device) -> CallProfiles:
        """Returns the profiles of calls with these facts.

        Args:
            site: the site of the call.
            tile_schedule: the tile schedule, over query heads.
        """
        p, properties = tile_schedule.problem, torch.cuda.get_device_properties(device)
        sizes = p.batch, p.heads, site.kv_heads, p.q_len, p.kv_len, site.head_dim, site.value_dim
        names = "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim"
        meta = {
            "kernel": plan.kernel,
            "plan": str(plan),
            "schedule": plan.schedule,
            "call": str(call),
            "mask": str(call.mask),
            "dtype": site.dtype,
            "shape": dict(zip(names, sizes, strict=True)),
            "tiles": {"q": p.block_q, "kv": p.block_kv},
            "work_ids": tile_schedule.work_ids,
            "gpu": properties.name,
            "sms": properties.multi_processor_count,
        }
        return CallProfiles((call, plan, sizes), p.batch * p.heads, p.n_kv, p.n_q, meta)

    def begin(self, site: str, device: torch.device) -> profiles.ProfileRun | None:
        """Begins a profile of a call at `site`, see `profiles.begin`; None if it is not profiled."""
        return profiles.begin(site, self.key, self.heads, self.kv_tiles, self.q_tiles, device, self.meta)
