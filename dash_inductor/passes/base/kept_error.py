"""`SiteKeptError` as it leaves a compile: as itself, and without the frames of compilers in its traceback."""

from __future__ import annotations

from ...errors import SiteKeptError
from ...upstream import configs
from ...upstream.dynamo import ShortenTraceback


class _Shortened(SiteKeptError, ShortenTraceback):
    """Dynamo wraps other errors of a backend in its own; it raises errors of this class as they are.

    Before it does, it has the error drop the frames from which users learn nothing.
    """

    def remove_dynamo_frames(self) -> _Shortened:
        return self if configs.dynamo.verbose else self.with_traceback(None)


_Shortened.__name__ = _Shortened.__qualname__ = SiteKeptError.__name__  # what a traceback shows
_Shortened.__module__ = SiteKeptError.__module__


def kept_error(message: str) -> SiteKeptError:
    """The error to raise."""
    return _Shortened(message, first_useful_frame=None)
