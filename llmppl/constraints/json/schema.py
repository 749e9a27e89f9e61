"""JSON Schema: the tokens that may follow in a text that must be an instance of a schema.

`texts.texts_of` compiles most schemas to an automaton. llguidance reads the others. Their states are the tuples of
tokens so far. For each recently used state, the index keeps a *matcher*, llguidance's parser after these tokens. It is
copied from that of the longest known prefix, so shared prefixes are read once. Forced tokenisation is switched off: a
mask holds all tokens that fit.

A matcher reads tokens of the vocabulary and, by ids past its end, single bytes, so a state may begin with bytes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from llmppl.constraints.automata.budget import TooLarge
from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.automata.regex import Regex
from llmppl.constraints.constraint import Bools, Index, State, VocabularyLike, bytes_of
from llmppl.constraints.json import checks, conditions, native, types
from llmppl.constraints.json.shapes import NotCompilable
from llmppl.constraints.json.texts import JsonTexts, OpenTexts, texts_of
from llmppl.constraints.masks import explain
from llmppl.constraints.masks.index import END, TokenIndex
from llmppl.constraints.vocabulary.trie import once, trie_of
from llmppl.support.arguments import integer, is_file_name, is_type
from llmppl.support.locks import Lock, cached_property, locked
from llmppl.support.shared import Shared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["JsonSchema", "JsonSchemaIndex"]

MATCHERS = 256                                      # kept by an index; each takes some 30 bytes per byte of its text
MASK_BYTES = 1 << 26                                # of masks kept by an index
TRIES = 3_000_000                                   # characters of parts of a schema that are tried to place an error
MAX_FOUND = 100_000                                 # states of all patterns that are checked on the finished text
BLANK = " ?"                                        # whitespace of a record in one line


class JsonSchema(Shared):
    """The JSON texts that are instances of a schema, as far as llguidance knows JSON Schema (draft 2020-12).

    Narrower than the standard: properties come in the order of the schema, then those it does not name. Integers have
    no fraction or exponent. A `format` must hold. The text has no whitespace around it. Wider: names that the schema
    does not list may repeat.

    Masks cannot enforce some keywords (`not`, `oneOf` of schemas that overlap, `if`, `uniqueItems`, `contains`,
    `dependentRequired` and the like). jsonschema checks these on the finished text: `parse` raises an error if one of
    them does not hold, and a particle with such a text dies. `warnings` lists them.

    Parameters
    ----------
    schema : dict, bool, str of JSON, or a type
        Types are a pydantic model, a dataclass, a TypedDict, list[int] and others of which pydantic has a schema.
        Their objects have no members but those of the type, and `parse` returns objects of the type.
        "x-guidance" in the schema may hold llguidance's own options, such as {"coerce_one_of": true}, which reads
        `oneOf` as `anyOf`. By default, a string without a pattern may have `\\u` escapes of any character; before
        llguidance 1.8, of control characters alone.
    whitespace : bool or str
        Whitespace between the tokens of JSON: a regex that matches it. The default allows a blank or nothing, False
        nothing, and True any whitespace of JSON, which a model may write for ever.
    lenient : bool
        Ignore unknown formats, `$dynamicRef`, `$recursiveRef` and names that look like misspelt keywords, instead of
        raising an error; `warnings` lists them.

    Raises
    ------
    ImportError
        llguidance is not installed, or pydantic for a type, or jsonschema for a check on the finished text.
    TypeError
        pydantic has no schema of the type.
    ValueError
        The schema is not JSON or no schema, uses unknown keywords, has no instances as far as llguidance can tell, has
        a part with infinite instances only, or is too deep or too large. The error names the place and the keyword.
    """

    def __init__(self, schema: Any, *, whitespace: bool | str = BLANK, lenient: bool = False):
        LLMatcher = native.llguidance().LLMatcher
        self.type = schema if is_type(schema) else None
        given_schema, missing = (schema, list[str]()) if self.type is None else types.schema_of(schema)
        self.schema: Any = _read(given_schema)
        self._given = f", whitespace={whitespace!r}" * (whitespace != BLANK) + ", lenient=True" * lenient
        self._options: dict[str, Any] = {}
        given = self.schema.get("x-guidance", {}) if isinstance(self.schema, dict) else {}
        has_own = isinstance(given, dict) and not given.keys().isdisjoint(("whitespace_flexible", "whitespace_pattern"))
        if whitespace is not True and not (whitespace == BLANK and has_own):
            self._options |= {"whitespace_flexible": bool(whitespace), "whitespace_pattern": whitespace or None}
        misspelt = checks.misspelt(self.schema) if isinstance(self.schema, dict) else None
        if misspelt and not lenient:
            raise ValueError(f"JSON schema at {misspelt} (lenient=True ignores it)")
        ignores = lenient or self.type is not None          # pydantic checks formats of its own
        known, unknown = conditions.known(self.schema, _is_format) if ignores else (self.schema, [])
        masked, unmasked = self._masked_part(known)
        if isinstance(self.schema, dict) and (place := checks.unproductive(self.schema)):
            raise ValueError(
                f"JSON schema at {place}: every instance would be infinite, since it needs another one of the same "
                f"kind inside; a choice that ends, such as anyOf with null, would work"
            )
        self._masked = self._with_options(masked)
        in_doubles, self._long = conditions.in_doubles(self._masked)
        text = json.dumps(conditions.with_leap_years(in_doubles))
        self._grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {text}'
        self._warnings: list[str] = native.in_large_stack(
            lambda: LLMatcher.validate_grammar_with_warnings(self._grammar, limits=native.limits())[1]
        )
        fate = "ignored" if self.type is None else "checked on the finished text"
        self._warnings += ([misspelt] if misspelt else []) + [f"{each} is {fate}" for each in unknown]
        self._warnings += [f"{each} is checked on the finished text" for each in unmasked] + missing
        self._new_condition = functools.partial(conditions.Condition, known, _meets, _found_by)
        self._condition = self._new_condition() if unmasked else None

    def index(self, vocab: VocabularyLike) -> TokenIndex | JsonSchemaIndex:
        """Return the index of the tokens that may follow: of the automaton if there is one, else of llguidance."""
        return JsonSchemaIndex(self, vocab) if self.automaton is None else self.automaton.index(vocab)

    @property
    def automaton(self) -> JsonTexts | OpenTexts | None:
        """Recognizer of the texts that knows the distance to an end; None if there is none (`fallback_reason`).

        It is a DFA, or a recognizer with a stack if some part may be any JSON.
        """
        return self._compiled[0]

    @property
    def fallback_reason(self) -> str:
        """Part of the schema that no automaton can express, so that llguidance makes the masks; "" if none."""
        return self._compiled[1]

    @property
    def warnings(self) -> list[str]:
        """Keywords that are checked on the finished text or ignored, and the warnings of llguidance."""
        return self._warnings + [f"{each} is checked on the finished text" for each in self._compiled[2]]

    @cached_property
    def _compiled(self) -> tuple[JsonTexts | OpenTexts | None, str, list[str], conditions.Condition | None]:
        """Automaton, reason if there is none, keywords left to the finished text, and their condition."""
        reason = ""
        for schema, left_out in conditions.looser(self._masked):
            try:
                texts = texts_of(schema, self)
                return texts, "", left_out, self._condition or (self._new_condition() if left_out else None)
            except (NotCompilable, ValueError) as error:        # jsonschema may read less than llguidance
                reason = reason or str(error)
        return None, reason, self._long, self._condition or (self._new_condition() if self._long else None)

    def parse(self, text: str) -> Any:
        """Return the value that a text writes, an object of the type if the schema is that of a type.

        Raises ValueError if the text is not JSON, or a keyword that masks do not enforce does not hold.
        """
        try:
            value = json.loads(text)
            condition = self._compiled[3]
            if condition is None and "\\u" in text:     # masks take an escaped name for one that is not listed
                condition = self._new_condition()
            failed = condition(value) if condition else ""
        except RecursionError:
            raise ValueError("the text is nested too deep to be read") from None
        if failed:
            raise ValueError(f"{failed} does not hold")
        return value if self.type is None else types.read(self.type, str(text), json=True)

    def __repr__(self) -> str:
        text = json.dumps(self.schema)
        return f"JsonSchema({text if len(text) <= 80 else text[:77] + '...'}{self._given})"

    def _masked_part(self, schema: Any) -> tuple[Any, list[str]]:
        """Return the strongest weakening of the schema that llguidance accepts, and the keywords it lacks."""
        own = self._options
        for weak, left_out, options in conditions.weaker(schema):
            self._options = own | options
            message = self._error(weak)
            if not message:
                return weak, left_out
            if "nsatisfiable" in message:
                break
        raise ValueError(self._located(weak, message))

    def _error(self, schema: dict[str, Any] | bool) -> str:
        """Return the error of llguidance for the schema, "" if there is none."""
        return native.error_of(json.dumps(self._with_options(conditions.in_doubles(schema)[0])))

    def _with_options(self, schema: dict[str, Any] | bool) -> Any:
        """Return the schema with all options in its "x-guidance"."""
        inside = schema if isinstance(schema, dict) else {}
        given = inside.get("x-guidance", {})
        if schema is False or not isinstance(given, dict):                      # an error either way
            return schema
        return inside | {"x-guidance": _escapes() | given | self._options}

    def _located(self, schema: Any, message: str) -> str:
        """Return the message with its place: the innermost schema that has the error, and the keys that cause it.

        llguidance does not name the place, so parts of the schema are tried instead: some hundred, or fewer of a large
        schema.
        """
        place, node = "#", schema if isinstance(schema, dict) else {}
        shared = {key: node[key] for key in ("$defs", "definitions", "x-guidance") if key in node}
        tries, most = itertools.count(), min(300, TRIES // len(json.dumps(schema)))
        inner: tuple[str, dict[str, Any]] | None = ("", node)
        while inner is not None:
            place, node = place + inner[0], inner[1]
            parts = (part for part in checks.parts(node) if next(tries) < most)
            inner = next((part for part in parts if self._error(shared | part[1]) == message), None)
        tried = [key for key in node if key not in shared and next(tries) < most + 50]
        rests = {key: {other: node[other] for other in node if other != key} for key in tried}
        keys = ", ".join(repr(key) for key, rest in rests.items() if self._error(shared | rest) != message)
        hint = "; lenient=True ignores it" if message.startswith(("Unimplemented", "Unknown format")) else ""
        return f"JSON schema at {place}{keys and ', ' + keys}: {message}{hint}"


class JsonSchemaIndex(Index):
    """Index of a schema over a vocabulary, by llguidance; its methods mean the same as those of TokenIndex.

    States are tuples of tokens, and END after an eos. `after` returns (bytes,), to which tokens are added. A copy is
    the index itself, so particles share the work: `num_read` counts the tokens, one for a new state with a
    known prefix.

    Raises ValueError if no token of the vocabulary can begin an instance. Every method raises it for a state of another
    index, and if llguidance reaches one of its limits, which only extreme schemas do.
    """

    start: State = ()
    end: State = END

    def __init__(self, constraint: JsonSchema, vocab: VocabularyLike) -> None:
        self.constraint, self.vocab, self.num_read = constraint, vocab, 0
        tokenizer, self._tokens = _tokenizer_of(vocab)
        self._eos, self._lock = sorted(vocab.eos_ids), Lock()
        matcher = native.llguidance().LLMatcher
        self._root: LLMatcher = native.in_large_stack(
            lambda: matcher(tokenizer, constraint._grammar, log_level=0, limits=native.limits())
        )
        self._matchers: OrderedDict[State, LLMatcher] = OrderedDict()
        self._distinct = WeakValueDictionary[bytes, Bools]()
        self._look = functools.lru_cache(max(64, MASK_BYTES // len(self._tokens)))(self._find)
        self._check_limits()
        if not self.mask(()).any():
            found = f"none of the {sum(map(bool, self._tokens))} tokens of this vocabulary fits"
            raise ValueError(f"{constraint!r} at the start: {self._expected(())}, and {found}")

    def __repr__(self) -> str:
        kept = self._look.cache_info().currsize
        return f"JsonSchemaIndex({self.constraint!r}, {len(self._tokens)} tokens, {kept} masks)"

    def mask(self, state: State) -> Bools:
        """Return the tokens that may follow: (V,) bool ndarray, read-only, True at every eos iff `state` accepts."""
        return self._look(state)[0]

    def accepts(self, state: State) -> bool:
        """Return whether the text may end in `state`; True at END."""
        return self._look(state)[1]

    @locked
    def next_bytes(self, state: State) -> bytes:
        """Return the bytes that may follow `state`, ascending; b"" if there are none."""
        if state is END:
            return b""
        matcher = self._matcher(state)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            raise self._gave_up(state, matcher)
        return bytes(np.flatnonzero(bits[len(self._tokens) :][:256]).tolist())

    def advance(self, state: State, token: int) -> State:
        """Return the state after `token`, END after an eos. Raises ValueError if `token` may not follow `state`."""
        if not 0 <= integer("token", token) < len(self._tokens):
            raise ValueError(f"token {token} is not in this vocabulary, whose ids are 0 to {len(self._tokens) - 1}")
        data = self._tokens[token]
        if self.mask(state)[token]:
            return (*state, int(token)) if data else END
        if state is END:
            raise ValueError(f"token {int(token)} cannot follow: an eos has ended the text")
        what = explain.token_name(token, data, token in self._eos)
        raise ValueError(
            f"{self.constraint!r}: {what} cannot follow {self._text(state)[-60:]!r}: {self._expected(state)}"
        )

    @locked
    def after(self, text: str | bytes) -> State:
        """Return the state after an existing text. Raises ValueError if no instance begins with it."""
        data = bytes_of(text)
        matcher = self._root.deep_copy()
        at = matcher.try_consume_tokens(self._ids((data,)))
        if at < len(data) and matcher.is_error():
            raise self._gave_up((data,), matcher)
        if at < len(data):
            where = f"byte {at} of the text, {data[at : at + 1]!r} after {data[:at][-60:]!r}, leaves the language"
            raise ValueError(f"{self.constraint!r}: {where}: {self._expected(self.after(data[:at]))}")
        return (data,) if data else ()

    @locked
    def _find(self, state: State) -> tuple[Bools, bool]:
        """Return the mask, which states with equal sets share, and whether the text may end."""
        mask, accepts = np.zeros(len(self._tokens), bool), state is END
        if state is not END:
            matcher = self._matcher(state)
            bits, accepts = np.frombuffer(matcher.compute_bitmask(), np.uint8), matcher.is_accepting()
            if matcher.is_error():
                raise self._gave_up(state, matcher)
            mask = np.unpackbits(bits, count=mask.size, bitorder="little").astype(bool)
            mask[self._eos] = accepts
        mask.flags.writeable = False
        key = np.packbits(mask).tobytes()
        return self._distinct.setdefault(key, mask), accepts

    def _matcher(self, state: State) -> LLMatcher:
        """Return the matcher that has read `state`, started from that of the longest stored prefix."""
        if not isinstance(state, tuple):
            raise ValueError(f"{state!r} is not a state of this index, whose states are tuples of tokens and END")
        known = len(state)
        while known and state[:known] not in self._matchers:
            known -= 1
        matcher = self._matchers[state[:known]] if known else self._root
        if known < len(state):
            ids, matcher = self._ids(state[known:]), matcher.deep_copy()
            if (read := matcher.try_consume_tokens(ids)) < len(ids):
                if matcher.is_error():
                    raise self._gave_up(state, matcher)
                raise ValueError(f"{state!r} is not a state of this index: its text leaves {self.constraint!r}")
            self.num_read += read
            self._matchers[state] = matcher
        if state:
            self._matchers.move_to_end(state)
        while len(self._matchers) > MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

    def _check_limits(self) -> None:
        """Check that llguidance does not give up at the start, or after a possible first byte. Raises ValueError."""
        for byte in self.next_bytes(()):
            self.after(b"%c" % byte)

    def _gave_up(self, state: State, matcher: LLMatcher) -> ValueError:
        why = f"llguidance gave up: {native.reason(matcher.get_error())}; a smaller schema would work"
        return ValueError(f"{self.constraint!r} after {self._text(state)[-60:]!r}: {why}")

    def _text(self, state: State) -> bytes:
        return b"".join(part if isinstance(part, bytes) else self._tokens[part] for part in state)

    def _ids(self, parts: tuple[Any, ...]) -> list[int]:
        """Return the ids of parts of a state for a matcher; no token becomes byte 255, which never fits."""
        V, ids = len(self._tokens), list[int]()
        for part in parts:
            is_token = isinstance(part, (int, np.integer)) and 0 <= part < V and self._tokens[part]
            ids += [V + byte for byte in part] if isinstance(part, bytes) else [int(part) if is_token else V + 255]
        return ids

    def _expected(self, state: State) -> str:
        return explain.expected(self.next_bytes(state), self.accepts(state))


def _read(schema: Any) -> Any:
    """Return the schema as JSON values of its own. Raises ValueError if it is not JSON, no schema, or too large."""
    is_text = isinstance(schema, str)
    value = _converted(json.loads, schema) if is_text else schema
    checks.check_size(value)
    if not is_text:
        value = json.loads(_converted(json.dumps, schema))
    if not isinstance(value, (dict, bool)):
        raise ValueError(f"a JSON schema is an object, true or false, not {json.dumps(value)}")
    checks.check_references(value)
    return value


def _converted(convert: Callable[[Any], Any], schema: Any) -> Any:
    try:
        return convert(schema)
    except RecursionError:
        raise ValueError(f"the schema is nested more than {checks.MAX_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        is_file = isinstance(schema, os.PathLike) or (isinstance(schema, str) and is_file_name(schema))
        hint = f"; for a file, pass its content: JsonSchema(Path({str(schema)!r}).read_text())" if is_file else ""
        raise ValueError(f"the schema is not JSON: {error}{hint}") from None


def _is_format(name: str) -> bool:
    try:
        return bool(_format(name))
    except ValueError:
        return False


def _meets(name: str, text: str) -> bool:
    """Return whether a text has a format, as in the masks. Raises ValueError for an unknown format."""
    index = _format(name)
    try:
        return index.accepts(index.after(json.dumps(text, ensure_ascii=False)))
    except ValueError:                                  # no instance begins so, or the text is no Unicode
        return False


def _found_by(patterns: set[str]) -> dict[str, DFA]:
    """Return for each pattern the texts in which `re.search` finds it. Raises ValueError if no automaton can tell."""
    found, left = dict[str, DFA](), MAX_FOUND
    for pattern in sorted(patterns):
        flags, bare = re.compile(pattern).flags & ~re.UNICODE, re.sub(r"^\(\?[a-zA-Z]+\)", "", pattern)
        try:
            bare += "\n" * bool(flags & re.X)           # it may end with a comment
            found[pattern] = Regex(f"(?s:.*)(?:{bare})(?s:.*)", flags)
            left -= found[pattern].explore(left).num_states
        except TooLarge as error:
            raise TooLarge(f"JSON schema: the pattern {pattern!r:.80}", error.count) from None
        except ValueError as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"JSON schema: the pattern {pattern!r:.80} cannot be checked on the text: {why}") from None
    return found


@functools.cache
def _format(name: str) -> JsonSchemaIndex:
    return JsonSchemaIndex(JsonSchema({"type": "string", "format": name}, whitespace=False), explain.BYTES)


@functools.cache
def _escapes() -> dict[str, bool]:
    """Return the option that allows `\\u` escapes of all characters, if this llguidance has it (from 1.8 on)."""
    option = {"json_allow_general_unicode_escapes": True}
    return {} if native.error_of(json.dumps({"x-guidance": option})) else option


@once
def _tokenizer_of(vocab: VocabularyLike) -> tuple[LLTokenizer, list[bytes]]:
    """Return the tokens and 256 bytes as llguidance wants them, and the tokens with b"" for special ones.

    llguidance has an eos of its own, after the bytes; the index handles those of the vocabulary.
    """
    tokens = trie_of(vocab).tokens
    shown = [*tokens, *(b"%c" % byte for byte in range(256)), b""]
    shown = [b"" if b"\xff" in token else token for token in shown]             # 0xFF marks special tokens there
    facts = SimpleNamespace(eos_token_id=len(tokens) + 256, bos_token_id=None, tokens=shown, special_token_ids=[])
    ll = native.llguidance()
    return ll.LLTokenizer(ll.TokenizerWrapper(facts), slices=ll.LLTokenizer.json_slices()), tokens
