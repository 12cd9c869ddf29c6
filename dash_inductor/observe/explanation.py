"""The public names of `explanations`."""

from ..explanations.explained import SiteExplanation
from ..explanations.explanation import Explanation

__all__ = ["Explanation", "SiteExplanation"]
