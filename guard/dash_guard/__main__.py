"""``python -m dash_guard`` is the command `dash-guard`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
