"""Messages of ranks, and how they reach the monitor: within a process, or over TCP with a shared secret."""
