"""JSON Schema as automata."""

from llmppl.constraints.json.schema import JsonSchema as JsonSchema
