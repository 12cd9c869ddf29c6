"""Writes recordings: fingerprints of what eager code, compiled graphs and CUDA graphs compute in training."""
