"""Sizes that files and devices share: of the hash and of fingerprints.

Imports nothing, so that recordings can be read without torch.
"""

LANES = 2
"""Numbers of 64 bits that a tensor is hashed to."""

DIGEST = 16
"""Bytes of a fingerprint."""
