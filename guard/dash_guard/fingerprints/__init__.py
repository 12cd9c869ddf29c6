"""128-bit fingerprints of tensors, computed on the device that holds them."""
