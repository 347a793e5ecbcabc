"""Measuring: synthetic checkpoints, this machine's ceilings, and what a load reaches of them."""
