"""Bars and drawings."""
