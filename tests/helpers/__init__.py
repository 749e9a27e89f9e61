"""Helpers that several test files share: small language models, programs, files, and processes to interrupt."""
