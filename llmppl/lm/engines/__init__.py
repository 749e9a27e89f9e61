"""Engines: programs that compute logits, and a registry of them by name."""
