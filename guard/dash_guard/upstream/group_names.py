"""The name of the guard's own process group; imports no torch."""

OWN = "guard"
"""The name in heartbeats; in the flight recorder the group has none, and the program does not know it."""
