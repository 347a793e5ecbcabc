"""Memory and tensors: the part that knows torch."""
