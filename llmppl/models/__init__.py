"""Probabilistic models: the programs that users write, and what they are made of."""
