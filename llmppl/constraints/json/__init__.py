"""JSON Schema as automata."""

from llmppl.constraints.json.schema import JsonSchema as JsonSchema
from llmppl.constraints.json.schema import JsonSchemaIndex as JsonSchemaIndex
from llmppl.constraints.json.texts import JsonTexts as JsonTexts
from llmppl.constraints.json.texts import OpenTexts as OpenTexts
