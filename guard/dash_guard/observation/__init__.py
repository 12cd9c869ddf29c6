"""What recordings and checks observe: modules, step numbers, the environment, and exchanges between ranks."""
