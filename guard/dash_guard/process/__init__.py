"""The guard in the process of a rank: its group, its checks, its heartbeat and its end."""
