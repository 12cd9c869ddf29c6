"""Plans a site from its static facts: kernel candidates, their costs, and the decision for one or for a fallback.

The package needs only the standard library; simulations and predictions also need sympy.
"""

from . import planner
from .planner import decide, plan

__all__ = ["decide", "plan", "planner"]
