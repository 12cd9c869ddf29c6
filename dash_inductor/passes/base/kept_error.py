"""`SiteKeptError` as users see it: Dynamo raises it as it is, and its traceback has no frames of compilers."""

from __future__ import annotations

from ...errors import SiteKeptError
from ...upstream import configs
from ...upstream.dynamo import ShortenTraceback


class _Shortened(SiteKeptError, ShortenTraceback):
    """An error that Dynamo raises as it is, where it wraps other errors of a backend.

    Dynamo first asks such an error to drop the frames of the compiler from its traceback.
    """

    def remove_dynamo_frames(self) -> _Shortened:
        return self if configs.dynamo.verbose else self.with_traceback(None)


_Shortened.__name__ = _Shortened.__qualname__ = SiteKeptError.__name__  # what a traceback shows
_Shortened.__module__ = SiteKeptError.__module__


def kept_error(message: str) -> SiteKeptError:
    """Returns the error to raise, with this message."""
    return _Shortened(message, first_useful_frame=None)
