"""PyTorch's attention as graphs of Dynamo call it: the builtin function behind `scaled_dot_product_attention`."""

from torch._C._nn import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
