"""Train kinds of programs on several processes: ``python -m guard.tests.support.undisturbed WORLD FOLDER NAME ...``

Rank 0 writes into ``FOLDER/results.jsonl`` what differs.
"""

import sys
from pathlib import Path

from tests.support.forked import ranks

from . import KINDS
from .compared import work


def main(world: str, folder: str, *names: str) -> int:
    return ranks(int(world), lambda number: work(number, int(world), Path(folder), names or list(KINDS)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
