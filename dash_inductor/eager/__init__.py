"""Attention of programs that are not compiled: transformers' register of attention implementations."""
