"""The builtin function that Dynamo's graphs call for `scaled_dot_product_attention`."""

from torch._C._nn import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
