"""Attention of programs that are not compiled: PyTorch's and transformers' registers of attention implementations."""
