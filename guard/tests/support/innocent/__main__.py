"""Runs `PROGRAMS` and `FAULTS` by name, see the package."""

from __future__ import annotations

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
