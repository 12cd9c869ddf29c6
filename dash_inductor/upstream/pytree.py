"""Values in nested containers."""

from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["tree_leaves", "tree_map_only"]
