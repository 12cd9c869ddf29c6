"""What checks and detectors agree on: names of classes of ranks, roots of digests, votes, processes of a node."""
