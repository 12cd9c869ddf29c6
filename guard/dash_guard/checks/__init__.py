"""The checks that run in the process of a rank, one file each.

replicas               compares the tensors that several ranks must hold with equal bits, by root digests
at_rest                compares hashes of state before and after a time in which nobody may change it
gathered_parameters    compares the parameters that FSDP2 has gathered with the shards of their owners
collective_checksums   compares the results of reductions among ranks, and with a second run of the same reduction
cross_rank_recompute   runs the micro-batch of one rank on all ranks
same_rank_recompute    runs a step a second time on the same rank
recomputed_update      runs the update of some parameters a second time
facts                  sends versions, settings and environment variables before the first step
times                  measures when a rank works and when it waits
data                   hashes the input data of data-parallel ranks
stop                   raises an error in all ranks together after a confirmed fault

`comms` holds the hooks on collectives of DDP and FSDP2 that `gathered_parameters` and `collective_checksums` need.
"""
