"""Checks, locks, graphs and the runtime: code that every other folder uses."""
