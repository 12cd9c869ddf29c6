"""Plans a site from its static properties: compares kernel candidates by cost, and chooses one, or a fallback.

The package needs only the standard library; simulations and predictions also need sympy.
"""

from . import planner
from .planner import decide, plan

__all__ = ["decide", "plan", "planner"]
