"""Checkpoints: a run written to a file, and continued from it."""
