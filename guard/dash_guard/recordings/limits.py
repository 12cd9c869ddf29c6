"""The limits of the sizes and counts in a recording file.  A recorder keeps to them, and a reader refuses more.

A recorded step of a model with 300 parameters takes some 20 KiB, and so a million of them 20 GiB.  A file is read in
blocks, one step at a time: of these limits only those on names and on a step decide how much memory that takes.
"""

from __future__ import annotations

FILE = 1 << 44
"""Bytes of a file: 16 TiB."""

FRAME = 16 << 20
"""Bytes of a frame: 16 MiB.  A step may have any number of frames."""

VALUES = 1 << 20
"""Values in a frame of JSON, as `dash_inductor.untrusted.parse_json` counts them."""

STEPS = (1 << 32) - 1
"""The last step: what the 32 bits of its number can say."""

NAMES = 1 << 24
"""Names, and tensors without a fingerprint, in a file.  A tensor that changes its shape has a name for each shape."""

NAMES_AT_ONCE = 100
"""Names in a frame that a recorder writes: however long they are, they keep to `FRAME` and `VALUES`."""

IN_STEP = 2
"""How often one name may stand in a step: once from Python, and once from CUDA graphs."""

TEXT = 4096
"""Characters of the name of a tensor, of the description of one, and of the reason why one has no fingerprint."""

RANKS = 1 << 20
"""Ranks of a run."""

SEGMENTS = 1000
"""Files of a rank: one for each process that went on with its training."""

FACTS = 10_000
"""Facts of one kind, for example environment variables; also numerics keys, and values of state."""

FACT = 1 << 17
"""Characters of a fact: as many as Linux lets an environment variable have."""

FINDINGS = 100
"""Findings of a run that are kept and listed.  There may be more of them, which are counted out by this limit."""
