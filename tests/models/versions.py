"""The table of models with several versions of transformers: ``python -m tests.models.versions``.

The table itself is made with the installed version.  Each ``requirements/transformersX.Y.txt`` locks another one and
what it needs; they are installed into a folder that is put first on PYTHONPATH, and the table keeps what differs.
``--only Bert T5`` does so for some families.  All families take an hour.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("transformers*.txt"))
INSTALL = ("-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes")
TABLE = ("-m", "tests.support.model_table")


def run(*arguments: str | Path, path: str = "") -> None:
    """Run this Python, with a folder of packages that win over installed ones."""
    paths = filter(None, (path, os.environ.get("PYTHONPATH")))
    subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="some families (default: all)")
    only = parser.parse_args().only
    families = ("--only", *only) if only else ()
    run(*TABLE, *families)
    for lock in LOCKS:
        with tempfile.TemporaryDirectory() as folder:
            run(*INSTALL, "--target", folder, "-r", lock)
            run(*TABLE, "--other", *families, path=folder)


if __name__ == "__main__":
    main()
