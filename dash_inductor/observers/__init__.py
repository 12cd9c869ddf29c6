"""Observers of a training run: the recorder writes fingerprints, from which the first difference of two runs is found.

observer, active, hooks    events, and who gets them     fingerprints/    128 bits of a tensor
recorder, modules, steps   what a recording holds        recordings/      files, and two of them side by side
in_graphs                  what compiled graphs show     verify           a script, run twice
replicas, exchange         ranks that must be equal
"""
