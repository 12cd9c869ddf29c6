"""Checks in the process of a rank, one file each.

replicas    tensors that several ranks have: one root of each stage and class
rest        state that nobody may change between two uses
doors       what FSDP has gathered against what went in
wires       what reductions have given to all members, and given twice; comms puts both doors into models
roll_call   all ranks compute what one rank computes in a step
replay      a rank computes a step again
facts       versions, numerics keys and variables, before the first step
times       when a rank waits and when it works
data        what data-parallel ranks read
stop        all ranks raise together where a verdict is to end the training
"""
