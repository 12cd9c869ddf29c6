"""From the facts of a site to what becomes of it: candidates, their costs, and the one decision.

Needs only the standard library, and sympy for what must be simulated and for predictions.
"""

from . import planner
from .planner import decide, plan

__all__ = ["decide", "plan", "planner"]
