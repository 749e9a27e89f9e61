"""Tools: the functions that an answer may call, and the texts in which it calls one.

A call is the JSON object {"name": ..., "arguments": {...}}. An answer is a call, or words: a text that begins with any
other character than `{`. So the first byte of an answer says which of the two it is, and neither needs an automaton.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmppl.constraints import JsonSchema
from llmppl.constraints.constraint import Bools, Index, State, VocabularyLike, without_bytes
from llmppl.support.shared import Shared

WORDS = "words"  # state inside an answer that calls no function
_CALL = re.compile(r"\s*(?:<tool_call>)?\s*(\{.*\})\s*(?:</tool_call>)?\s*", re.DOTALL)


def calls_of(functions: dict[str, dict[str, Any]]) -> JsonSchema:
    """Return the schema of a call of one of the functions, from their names to the schemas of their parameters.

    References in the parameters stay within them. An object that lists its properties has no other ones.
    """
    calls = []
    resources = {}
    for name, parameters in functions.items():
        uri = f"urn:{name}"
        resources[uri] = {"additionalProperties": "properties" not in parameters} | parameters
        properties = {"name": {"const": name}, "arguments": {"type": "object", "$ref": uri}}
        call = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        calls.append(call)
    return JsonSchema({"anyOf": calls}, resources=resources)


def read_call(text: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the call that a text makes, as an entry of `tool_calls`; None if it makes none.

    The tags of a call that many chat templates ask for may surround it. Some templates want an id of nine characters.
    """
    found = _CALL.fullmatch(text)
    if not found:
        return None
    try:
        call = json.loads(found[1])
    except ValueError:
        return None
    if (
        not isinstance(call, dict)
        or call.get("name") not in names
        or not isinstance(call.get("arguments"), dict)
    ):
        return None
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class CallOrWords(Shared):
    """Constraint on an answer that calls a function or says something."""

    def __init__(self, calls: JsonSchema) -> None:
        self.calls = calls

    def index(self, vocab: VocabularyLike) -> CallOrWordsIndex:
        return CallOrWordsIndex(self, vocab)

    def parse(self, text: str) -> Any:
        """Return the object of a call, or the words."""
        return self.calls.parse(text) if text.startswith("{") else text

    def __repr__(self) -> str:
        return f"CallOrWords({self.calls!r})"


class CallOrWordsIndex(Index):
    """Index of `CallOrWords`. Its states are those of the calls, and `WORDS`."""

    def __init__(self, constraint: CallOrWords, vocab: VocabularyLike) -> None:
        self.constraint = constraint
        self.vocab = vocab
        self.calls = constraint.calls.index(vocab)
        self.start = self.calls.start
        self._first = np.array([data != b"" and not data.startswith(b"{") for data in vocab.tokens])
        self._words = np.array([data != b"" for data in vocab.tokens])
        for mask in self._first, self._words:
            mask[[*without_bytes(vocab)]] = False
        self._words[[*vocab.eos_ids]] = True

    def mask(self, state: State) -> Bools:
        return self._words if state is WORDS else self._either(state, self.calls.mask(state))

    def mask_within(self, state: State, n: float) -> Bools:
        return (
            self._words if state is WORDS else self._either(state, self.calls.mask_within(state, n))
        )

    def _either(self, state: State, mask: Bools) -> Bools:
        """Return the mask of calls with the tokens that begin words, if `state` is the start."""
        return mask | self._first if state == self.start else mask

    def advance(self, state: State, token: int) -> State:
        if state is WORDS or (state == self.start and self._first[token]):
            return WORDS
        return self.calls.advance(state, token)

    def after(self, text: str) -> State:
        """Return the state after a text, whatever its tokens."""
        return self.calls.after(text) if text.startswith("{") else WORDS

    def accepts(self, state: State) -> bool:
        return state is WORDS or self.calls.accepts(state)

    def tokens_to_accept(self, state: State, most: float = math.inf) -> float:
        """Return the least number of tokens to the end of a call, and 0 within words."""
        return 0 if state is WORDS else self.calls.tokens_to_accept(state, most)
