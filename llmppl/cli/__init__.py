"""The command line."""

from llmppl.cli.main import app as app
