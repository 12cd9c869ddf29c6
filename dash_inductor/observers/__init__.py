"""First divergence: record fingerprints of what training computes, and find the first one in which two runs differ.

recorder     what is recorded, and when         hashing, gpu_kernels, fingerprint    128 bits of a tensor
hooks        what eager PyTorch shows           rows, writer, file                   from the device to the disk
in_graphs    what compiled graphs show          compare, report, page                two recordings, side by side
replicas     ranks that must be equal           verify                               a script, run twice
"""
