"""Makes the `FallbackError` that users see: Dynamo does not wrap it, and removes compiler frames from its traceback."""

from __future__ import annotations

from ...errors import FallbackError
from ...upstream import configs
from ...upstream.dynamo import ShortenTraceback


class _Shortened(FallbackError, ShortenTraceback):
    """A `FallbackError` that Dynamo raises unchanged, while it wraps other errors of a backend.

    Before raising it, Dynamo calls `remove_dynamo_frames`, which drops the compiler's frames from the traceback.
    """

    def remove_dynamo_frames(self) -> _Shortened:
        return self if configs.dynamo.verbose else self.with_traceback(None)


_Shortened.__name__ = _Shortened.__qualname__ = FallbackError.__name__  # shown in tracebacks
_Shortened.__module__ = FallbackError.__module__


def fallback_error(message: str) -> FallbackError:
    """Returns a `FallbackError` with this message, which Dynamo passes on to the user unchanged."""
    return _Shortened(message, first_useful_frame=None)
