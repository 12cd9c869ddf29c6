"""Attention for programs that are not compiled, through PyTorch's and transformers' registries of implementations."""
