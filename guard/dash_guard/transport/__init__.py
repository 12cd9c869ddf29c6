"""Messages between ranks and the monitor, and their transport: in one process, or over TCP with a shared secret."""
