"""Inference: advance many weighted copies of a model, and what that returns."""
