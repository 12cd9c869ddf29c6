"""Ways in which programs call attention, each beside what a user would have instead, on one GPU.

    python -m benchmarks.entries [--only sinks lse gpt_oss gemma2 titan flash] [--name entries]

sinks: a causal site with sinks beside the same without.  lse: the same with a log-sum-exp that the program reads, and
its gradient.  gpt_oss, gemma2: attention by hand of transformers, deterministic beside the compiled default.  titan: a
step of Llama 3 by FlexAttention on packed documents.  flash: calls of flash-attn's operators beside deterministic
FlashAttention-2 and cuDNN.  Medians of calls that take turns, in us; "ours/it" is our time as a part of the other's.
Results: benchmarks/results/<name>_<group>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch._functorch.config

from . import common, entry_sites, flash_sites, titan

GROUPS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sinks": entry_sites.sinks,
    "lse": entry_sites.lse,
    "gpt_oss": entry_sites.gpt_oss,
    "gemma2": entry_sites.gemma2,
    "titan": titan.titan,
    "flash": flash_sites.flash,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--name", default="entries", help="what the names of the results files begin with")
    options = parser.parse_args()
    failed = {}
    for group in options.only:
        start = time.perf_counter()
        torch._functorch.config.donated_buffer = group == "titan"  # elsewhere one forward has many backwards
        try:
            rows = GROUPS[group]()
        except Exception as error:  # of whatever kind: the other groups are measured
            failed[group] = f"{type(error).__name__}: {error}"
            print(f"{group}: {failed[group]}", flush=True)
            continue
        path = common.write(f"{options.name}_{group}", {"conditions": common.conditions(), "rows": rows})
        print(f"{group}: {time.perf_counter() - start:.0f} s, {path}\n", flush=True)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
