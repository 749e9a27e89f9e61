"""Language models: what a text may be followed by, and with what probability."""
