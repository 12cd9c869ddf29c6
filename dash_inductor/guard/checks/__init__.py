"""Checks of bits in the process of a rank.

replicas    tensors that several ranks have: one root of each stage and class
rest        state that nobody may change between two uses
doors       what collectives have handed out against what went in
"""
