"""``python -m tests.support.undisturbed WORLD FOLDER NAME ...`` trains these kinds of programs on so many processes.

Rank 0 writes into ``FOLDER/results.jsonl`` what differs.
"""

import sys
from pathlib import Path

from ..forked import ranks
from . import KINDS
from .compared import work


def main(world: str, folder: str, *names: str) -> int:
    return ranks(int(world), lambda number: work(number, int(world), Path(folder), names or list(KINDS)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
