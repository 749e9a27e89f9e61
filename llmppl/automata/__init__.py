"""Automata: which strings, and so which tokens, may follow. They read bytes and know no language model."""
