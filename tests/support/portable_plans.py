"""Plans of the portable kernels, also where the planner takes others."""

from __future__ import annotations

from unittest import mock

from dash_inductor.kernels.families import PORTABLE
from dash_inductor.model.plan import Plan
from dash_inductor.model.site import Site
from dash_inductor.planning import planner


def portable_plan(site: Site, arch: str, schedule: str | None = None) -> Plan:
    """The plan that the planner would choose if there were no other kernels."""
    with mock.patch.object(planner, "FAMILIES", (PORTABLE,)):
        return planner.plan(site, arch, schedule)
