"""Calls of the command line in this process."""

import json

from typer.testing import CliRunner

from llmppl import cli


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def particles(*arguments):
    """Return the JSON objects that a command prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]
