"""What checks and detectors agree on: names of classes of ranks, digests, votes, heartbeats, processes of a node."""
