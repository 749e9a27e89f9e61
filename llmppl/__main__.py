"""`python -m llmppl`, where the script `llmppl` is not in the path."""

from llmppl.cli import app

app(prog_name="python -m llmppl")
