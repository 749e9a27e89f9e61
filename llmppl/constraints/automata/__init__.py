"""Automata over bytes: regular expressions, edits, rewrites and set operations."""
