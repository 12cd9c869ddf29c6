"""Observations that recordings and checks share: modules, step numbers, the environment, exchanges between ranks."""
