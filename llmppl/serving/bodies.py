"""Bodies of requests: the fields of OpenAI for chat and completions, and those of `generate`.

A field that would change the texts and has no meaning here is refused. A request holds data only: its grammars import
from lark's own files, and its schemas refer to nothing outside.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmppl.constraints import Grammar, JsonSchema, Regex
from llmppl.distributions import Rule
from llmppl.tasks.generation import Method

_FOREIGN = re.compile(r"%import(?!\s+(common|lark|python|unicode)\b)")      # of a grammar: reads a file
_WORDS = Regex(r"[^{][\s\S]*")                          # an answer that calls no function


@dataclass(frozen=True)
class Limits:
    """Largest requests: bytes of a body, tokens of a text, particles N K, prompts and choices, seconds of an answer."""

    bytes: int = 1_000_000
    tokens: int = 4096
    particles: int = 256
    prompts: int = 64
    seconds: float = 120.0


class Constraint(BaseModel):
    """Constraint on a text: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    regex: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    choice: list[str] | None = None

    def build(self) -> Any:
        """Return the constraint of the library. ValueError if there is not one field, or it is wrong."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise ValueError('constraint takes one of "regex", "grammar", "json_schema" and "choice"')
        if _FOREIGN.search(self.grammar or ""):
            raise ValueError("constraint.grammar may import only from common, lark, python and unicode")
        [(kind, value)] = given.items()
        return {"regex": Regex, "grammar": Grammar, "json_schema": JsonSchema, "choice": list}[kind](value)


Neutral = Annotated[float, Field(ge=0, le=0)] | None


class Body(BaseModel):
    """Fields that both endpoints take."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    presence_penalty: Neutral = None
    frequency_penalty: Neutral = None
    logit_bias: dict[str, Neutral] | None = None
    user: Any = None
    stop: str | list[str] | None = None
    # our own
    constraint: Constraint | None = None
    method: Method = "auto"
    N: int | None = Field(None, ge=1)
    K: int | None = Field(None, ge=1)
    power: float | None = Field(None, gt=0)
    budget: int | None = Field(None, ge=1)
    timeout: float | None = Field(None, gt=0)

    def options(self, limits: Limits, constraint: Any) -> dict[str, Any]:
        """Return the options of `Service.generate`. ValueError above a limit."""
        exact = isinstance(constraint, list) and self.method in ("auto", "exact")
        method: str = "exact" if exact else "importance" if self.n > 1 and self.method == "auto" else self.method
        N = max(self.N or 20 * (constraint is not None), self.n) if self.n > 1 and not exact else self.N
        for name, value, most in (
            ("n", self.n, limits.prompts), ("max_tokens", self.max_tokens, limits.tokens),
            ("N K", (N or 1) * (self.K or 1), limits.particles), ("timeout", self.timeout, limits.seconds),
        ):  # fmt: skip
            if (value or 0) > most:
                raise ValueError(f"{name} is {value}, and this server takes at most {most:g}")
        given = {
            "method": method, "N": N, "K": self.K, "power": self.power, "seed": self.seed, "budget": self.budget,
            "rule": None if self.temperature == self.top_p == 1 else Rule(self.temperature, top_p=self.top_p),
            "stop": self.stop or None, "max_tokens": None if exact else self.max_tokens,
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


class Function(BaseModel):
    """Function that an answer may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {"type": "object"}

    def call_schema(self) -> dict[str, Any]:
        """Return the schema of a call with listed arguments. References of the parameters stay within them."""
        arguments = {"$id": f"urn:{self.name}", "additionalProperties": "properties" not in self.parameters}
        properties = {"name": {"const": self.name}, "arguments": arguments | self.parameters}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


class Tool(BaseModel):
    """Function among the tools of a request."""

    type: Literal["function"]
    function: Function


class ToolCall(BaseModel):
    """Call of a function in an earlier message. Its arguments are JSON."""

    function: dict[Literal["name", "arguments"], str]


class Part(BaseModel):
    """Text of a message in parts."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None

    def plain(self) -> dict[str, str]:
        """Return the message as a text of the system, the user or the assistant. Calls of functions are JSON."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content or ()]
        calls = [json.dumps(each.function) for each in self.tool_calls or ()]
        role = {"tool": "user", "developer": "system"}.get(self.role, self.role)
        return {"role": role, "content": "".join(parts + calls)}


class NamedSchema(BaseModel):
    """JSON schema of an answer, with a name that says nothing here."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """Form of an answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Chat(Body):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    def functions(self) -> list[Function]:
        """Return the functions of which the answer calls one; none if the answer is a text."""
        functions, choice = [tool.function for tool in self.tools], self.tool_choice
        if choice == "none":
            return []
        if isinstance(choice, Tool):
            functions = [each for each in functions if each.name == choice.function.name]
        if not functions and choice != "auto":
            raise ValueError('tool_choice must be "auto", "required", "none" or one of tools')
        return functions

    def target(self) -> Any:
        """Return the constraint of the library on the answer, or None."""
        functions, form = self.functions(), self.response_format or ResponseFormat(type="text")
        if bool(functions) + (self.constraint is not None) + (form.type != "text") > 1:
            raise ValueError("tools, constraint and response_format exclude each other: give one")
        if functions:
            calls = JsonSchema({"anyOf": [each.call_schema() for each in functions]})
            if self.tool_choice != "auto":
                return calls
            if calls.automaton is None:
                raise ValueError(f'tool_choice must be "required" for these tools: {calls.fallback_reason}')
            self.method = "sample" if (self.method, self.n) == ("auto", 1) else self.method
            return calls.automaton | _WORDS
        if form.type != "text":
            if (form.type == "json_schema") != (form.json_schema is not None):
                raise ValueError('response_format.json_schema belongs to the type "json_schema": {"schema": ...}')
            return JsonSchema({"type": "object"} if form.json_schema is None else form.json_schema.schema_)
        return self.constraint and self.constraint.build()

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages, after a description of the functions that the answer may call."""
        messages = [each.plain() for each in self.messages]
        if functions := self.functions():
            described = json.dumps([each.model_dump() for each in functions])
            how = f'Call one of these functions, as {{"name": ..., "arguments": ...}}: {described}'
            how += " Or answer in words." * (self.tool_choice == "auto")
            if messages[0]["role"] == "system":
                how = f"{messages.pop(0)['content']}\n{how}"
            messages.insert(0, {"role": "system", "content": how})
        return messages


class Completion(Body):
    """Body of /v1/completions."""

    prompt: str | list[str]
    logprobs: int | None = Field(None, ge=0)
    echo: Literal[False] = False
