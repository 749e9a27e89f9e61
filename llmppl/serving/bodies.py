"""Bodies of requests: the fields of OpenAI for chat and completions, and those of `generate`.

A field that is null has its default. A field that changes no text is ignored. A field that would change the texts and
has no meaning here is refused, with the name of a field that would work. A request holds data only: its grammars import
from lark's own files, and its schemas refer to nothing outside.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from llmppl.constraints import Grammar, JsonSchema, Regex
from llmppl.distributions import Rule
from llmppl.lm import CachedTransformer, Context
from llmppl.serving.tools import CallOrWords, calls_of
from llmppl.tasks.generation import Method, Plan

STOPS = 64  # strings of `stop`
CHARACTERS = 16  # of a prompt, for each token that the model reads
_FOREIGN = re.compile(r"%import(?!\s+(common|lark|python|unicode)\b)")  # of a grammar: reads a file
ANY = object()
# further fields of clients, with the value that changes no text
HARMLESS = dict.fromkeys(
    (
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    ),
    ANY,
) | {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "suffix": "",
}


@dataclass(frozen=True)
class Limits:
    """Largest requests: bytes of a body, tokens of a text, particles N K, prompts and choices, seconds of an answer."""

    bytes: int = 1_000_000
    tokens: int = 4096
    particles: int = 256
    prompts: int = 64
    seconds: float = 120.0


class Fields(BaseModel):
    """Object of a request. A field that is null has its default."""

    model_config = ConfigDict(strict=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Constraint(Fields):
    """Constraint on a text: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid")
    regex: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    choice: list[str] | None = None

    def build(self) -> Any:
        """Return the constraint of the library. ValueError if there is not one field, or it is wrong."""
        given = self.model_dump(exclude_none=True)
        if len(given) != 1:
            raise ValueError(
                'constraint takes one of "regex", "grammar", "json_schema" and "choice"'
            )
        if _FOREIGN.search(self.grammar or ""):
            raise ValueError(
                "constraint.grammar may import only from common, lark, python and unicode"
            )
        if self.choice == []:
            raise ValueError("constraint.choice must list at least one text")
        [(kind, value)] = given.items()
        return {"regex": Regex, "grammar": Grammar, "json_schema": JsonSchema, "choice": list}[
            kind
        ](value)


class Body(Fields):
    """Fields that both endpoints take."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    stop: str | Annotated[list[str], Field(max_length=STOPS)] | None = None
    # our own
    constraint: Constraint | None = None
    method: Method = "auto"
    N: int | None = Field(None, ge=1)
    K: int | None = Field(None, ge=1)
    complete: bool | None = None
    power: float | None = Field(None, gt=0, le=1000)
    budget: int | None = Field(None, ge=1, lt=2**63)
    timeout: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Return the fields that have a meaning here. ValueError for one that would change the texts."""
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            harmless = HARMLESS.get(name)
            if value is None or name in cls.model_fields or harmless is ANY:
                continue
            if value != harmless or isinstance(value, bool) != isinstance(harmless, bool):
                raise ValueError(f"{name} is not supported: {_instead(name, cls.model_fields)}")
        return {name: value for name, value in given.items() if name not in HARMLESS}

    def runs(self, lm: CachedTransformer, limits: Limits, constraint: Any) -> list[dict[str, Any]]:
        """Return the options of `Service.generate` for the answer, and for a run that finds others if n > 1.

        ValueError above a limit. Without a method, an answer that may call a function is drawn, and so is JSON at a
        temperature. Otherwise JSON is greedy: the most probable of several texts would be the shortest one.
        """
        for name, value, most in (
            ("n", self.n, limits.prompts),
            ("max_tokens", self.max_tokens, limits.tokens),
            ("N K", (self.N or 1) * (self.K or 1), limits.particles),
            ("timeout", self.timeout, limits.seconds),
        ):
            if (value or 0) > most:
                raise ValueError(f"{name} is {value}, and this server takes at most {most:g}")
        method: str = self.method
        names = ["N", "K", "power", "budget"]
        if isinstance(constraint, list) and method in ("auto", "exact"):
            method = "exact"
        else:
            names += ["max_tokens", "stop", "complete"]
        given = {
            name: getattr(self, name) for name in names if getattr(self, name) not in (None, "", [])
        }
        temperature = self.temperature
        if temperature is None or (
            method == "exact" and temperature == 0
        ):  # it takes the most probable option
            temperature = 1.0
        rule = Rule(temperature, self.top_k, self.top_p, self.min_p)
        if rule != Rule(top_p=1.0):
            given["rule"] = rule
        is_drawn = isinstance(constraint, CallOrWords) or (
            isinstance(constraint, JsonSchema) and self.temperature
        )
        if (
            method == "auto"
            and is_drawn
            and self.temperature != 0
            and not given.keys() & {"N", "power"}
        ):
            method = "sample"
        chosen = Plan(lm, constraint, method, given, self.seed, {}).method
        if chosen == "greedy" and not getattr(constraint, "unmasked", ()):
            method = "greedy"  # no check can refuse the text, so that it may stream
        run = {
            "timeout": self.timeout or limits.seconds,
            "method": method,
            "seed": self.seed,
            **given,
        }
        if self.n == 1 or chosen not in ("sample", "greedy"):
            return [run]
        further = {**run, "method": "importance", "N": 2 * self.n}
        if chosen == "greedy":
            further.pop("rule", None)
        return [run, further]

    def target(self) -> Any:
        """Return the constraint of the library on the answer, or None."""
        return self.constraint and self.constraint.build()


def _instead(name: str, known: Iterable[str]) -> str:
    """Return the fields that work in place of one that does not."""
    if re.search("guided|structured|grammar|regex|schema|^choice|format", name):
        return 'give constraint: {"regex": ...}, {"grammar": ...}, {"json_schema": ...} or {"choice": [...]}'
    close = difflib.get_close_matches(name, known, 1, 0.8)
    return f"did you mean {close[0]}?" if close else f"a request takes {', '.join(known)}"


# ---- chat


class Function(Fields):
    """Function that an answer may call."""

    name: str = Field(pattern=r"^[\w./:-]{1,128}$")
    description: str = ""
    parameters: dict[str, Any] = {}


class Tool(Fields):
    """Function among the tools of a request."""

    type: Literal["function"]
    function: Function


class ToolCall(Fields):
    """Call of a function in an earlier message. Its arguments are JSON."""

    id: str = ""
    type: Literal["function"] = "function"
    function: dict[Literal["name", "arguments"], Any]

    @field_validator("function")
    @classmethod
    def _read(cls, function: Any) -> Any:
        """Return the call as chat templates read it, with an object as arguments."""
        with contextlib.suppress(ValueError, TypeError):
            function["arguments"] = json.loads(function.get("arguments"))
        return function


class Message(Fields):
    """Message of a conversation. Parts of its content are joined. A chat template may read further fields."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[ToolCall] = []

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind != "text":
                raise ValueError(f"a part of a message must be a text, not {str(kind)[:80]}")
            if not isinstance(part.get("text"), str):
                raise ValueError('a part of a message must be {"type": "text", "text": "..."}')
            texts.append(part["text"])
        return "".join(texts)

    def plain(self, reads_tools: bool = False) -> dict[str, Any]:
        """Return the message for a chat template.

        For one that reads no tools it is a text of the system, the user or the assistant, with calls in JSON.
        """
        role = "system" if self.role == "developer" else self.role
        if reads_tools:
            fields = {"content": "", **self.model_dump(exclude_unset=True), "role": role}
            if not self.tool_calls:
                fields.pop("tool_calls", None)
            return fields
        calls = [json.dumps(call.function) for call in self.tool_calls]
        return {
            "role": "user" if role == "tool" else role,
            "content": "".join([self.content, *calls]),
        }


class NamedSchema(Fields):
    """JSON schema of an answer, with a name that says nothing here."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Fields):
    """Form of an answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class Chat(Body):
    """Body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat = ResponseFormat(type="text")
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _with_max_tokens(self) -> Self:
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self

    def functions(self) -> dict[str, Function]:
        """Return the functions of which the answer calls one, by their names; none if the answer is a text."""
        functions = {tool.function.name: tool.function for tool in self.tools}
        choice = self.tool_choice
        if choice == "none":
            return {}
        if isinstance(choice, Tool):
            name = choice.function.name
            functions = {name: functions[name]} if name in functions else {}
        if not functions and choice != "auto":
            raise ValueError('tool_choice must be "auto", "required", "none" or one of tools')
        return functions

    def target(self) -> Any:
        functions = self.functions()
        form = self.response_format
        if bool(functions) + (self.constraint is not None) + (form.type != "text") > 1:
            raise ValueError("tools, constraint and response_format exclude each other: give one")
        if functions:
            calls = calls_of({name: function.parameters for name, function in functions.items()})
            return CallOrWords(calls) if self.tool_choice == "auto" else calls
        if form.type == "json_object":
            return JsonSchema({"type": "object", "minProperties": 1})  # {} may be the likeliest
        if (form.type == "json_schema") != (form.json_schema is not None):
            raise ValueError(
                'response_format.json_schema belongs to the type "json_schema": {"schema": ...}'
            )
        if form.json_schema is not None:
            return JsonSchema(form.json_schema.schema_)
        return super().target()

    def prompts(self, lm: CachedTransformer) -> list[Context]:
        """Return the context of the messages, with the functions that the answer may call."""
        functions = [function.model_dump() for function in self.functions().values()]
        tools = [{"type": "function", "function": function} for function in functions]
        try:
            return [
                lm.chat(
                    [each.plain(reads_tools=True) for each in self.messages], tools=tools or None
                )
            ]
        except (TypeError, ValueError):  # the template reads no tools or not these
            messages = [each.plain() for each in self.messages]
        if functions:
            how = f'Call one of these functions, as {{"name": ..., "arguments": ...}}: {json.dumps(functions)}'
            if self.tool_choice == "auto":
                how += " Or answer in words."
            first = messages[0]  # some templates refuse a system message
            texts = [how, first["content"]]
            if first["role"] == "system":
                texts.reverse()
            first["content"] = "\n".join(texts)
        return [lm.chat(messages)]

    @property
    def length(self) -> int:
        """Number of characters of the longest prompt."""
        return sum(len(each.model_dump_json()) for each in (*self.messages, *self.tools))

    @property
    def num_top(self) -> int | None:
        """Number of tokens whose log-probabilities the answer shows at each place; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class Completion(Body):
    """Body of /v1/completions."""

    prompt: str | list[str]
    special: bool = True
    logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self, lm: CachedTransformer) -> list[Context]:
        """Return the contexts of the prompts."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [*map(functools.partial(lm.context, special=self.special), prompts)]

    @property
    def length(self) -> int:
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return max(map(len, prompts), default=0)

    @property
    def num_top(self) -> int | None:
        return self.logprobs


def check_length(lm: CachedTransformer, length: int) -> None:
    """Raise a ValueError if a prompt of so many characters is far longer than the model reads."""
    longest = lm.engine.max_length
    if longest is not None and length > CHARACTERS * longest:
        raise ValueError(
            f"a prompt of {length:,} characters, and the model reads {longest:,} tokens: shorten it"
        )
