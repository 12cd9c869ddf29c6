"""The detectors turn messages of checks into findings: pure functions of messages and the time, one file each.

replicas               which rank differs from its replicas, since which step and in which tensor
at_rest                on which rank state has changed between two uses
gathered_parameters    whose gathered copy or whose shard differs
collective_checksums   which reduction has given different results
learned                which ranks hold equal bits where the program declares nothing
cross_rank_recompute   which rank computes the micro-batch of another rank differently
same_rank_recompute    which rank computes its own step differently the second time
liveness               which rank hangs, has died or is stopped
slow                   which rank works longer than its peers, and which group transfers slowly
foreign                which rank runs another program, software or machine than the others
data                   which ranks read the same data
diagnosis              combines findings: two independent facts confirm a fault
"""
