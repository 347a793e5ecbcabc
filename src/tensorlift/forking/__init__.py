"""Weights out of a running instance: what a seed publishes, and how a fork reads it."""
