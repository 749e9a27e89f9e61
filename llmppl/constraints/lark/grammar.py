"""Context-free grammars in Lark's syntax, read byte by byte.

A text is in the language iff `lark.Lark(grammar, parser="lalr", lexer="contextual")` parses it. The tables and the
terminals of each parser state equal lark's. Only the loop differs: it takes one byte at a time and never goes back.

The one idea: assume where a token ends instead of waiting to see it. A *hypothesis* assumes an end of every token so
far. It is a parser stack (`parser.py`) and the current partial tokens (`lexer.py`), as a hypothesis of a machine
(`unit.py`). Exactly one hypothesis survives the whole text, so no byte is read twice. For example, `1e+x` is read as
`1 e + x` under the hypothesis that `1` ends there, which forbids an exponent. A hypothesis is dropped unless the
parser takes a next terminal (`completion.py`). `step` returns None only if no continuation of the text is accepted.

Sources: the lexer and parser of lark 1.3; Willard & Louf (2023), section 4, for parsers as recognizers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from lark import Lark
from lark.indenter import Indenter

from llmppl.constraints.constraint import Bools
from llmppl.constraints.lark.completion import Completion
from llmppl.constraints.lark.lexer import PartialTokens
from llmppl.constraints.lark.loader import Parts, read
from llmppl.constraints.lark.unit import LarkUnit
from llmppl.constraints.machine.machine import Continuation, Item, State
from llmppl.constraints.machine.parts import Part, Special
from llmppl.support.arguments import is_file_name, shown, text
from llmppl.support.graphs import Numbering
from llmppl.support.locks import cached_property


class Grammar(Part):
    """Recognizer of the texts that `lark.Lark(grammar, parser="lalr", lexer="contextual", start=start)` parses.

    `step(state, byte)` is None only if no text that continues so is accepted; it may be a state that no text completes.
    States are immutable, hashable and shared: equal ones are one object, up to 65,536 states.

    Parameters
    ----------
    grammar : str, in Lark's syntax
    start : name of the rule that a whole text must match
    import_paths : folders in which lark looks for imported grammars, before its own
    g_regex_flags : flags of `re`, for all terminals
    postlex : a lark.indenter.Indenter, for indented text
    source_path : file of the grammar, for relative imports
    specials : special tokens of terminals that the grammar declares, {"TOOL": "<tool_call>"} with `%declare TOOL`
        Each by its text or id, or a `Special`. It is a symbol beside the bytes, as there.

    Raises
    ------
    ValueError
        If the grammar has a syntax error (shown with a caret), a conflict (lark's report), no rule `start`, or no text
        that it parses; if a terminal (named) is not regular or matches the empty text; if postlex is no plain Indenter.

    Examples
    --------
    >>> grammar = Grammar('start: " (" /[ab]/ ("," /[ab]/)* ")"')
    >>> smc_steer(ConstrainedText(lm, "f =", grammar, max_tokens=8), N=4, K=3, seed=0).best.s
    ' (a)'
    """

    def __init__(
        self,
        grammar: str,
        start: str = "start",
        *,
        import_paths: Sequence[Any] = (),
        g_regex_flags: int = 0,
        postlex: Any = None,
        source_path: str | None = None,
        specials: Mapping[str, str | int | Special] = MappingProxyType({}),
    ):
        self.text = text("grammar", grammar)
        if is_file_name(grammar):
            raise ValueError(
                f"grammar: {grammar!r} is the name of a file: Grammar.from_file({grammar!r}) reads it"
            )
        self._options: dict[str, Any] = {
            "start": start,
            "import_paths": list(import_paths),
            "postlex": postlex,
        }
        self._options |= {"g_regex_flags": g_regex_flags, "source_path": source_path}
        self.specials = {}
        for name, special in specials.items():
            if not isinstance(special, Special):
                special = Special(special)
            self.specials[name] = special.token
        for name in ("process", "_process", "handle_NL"):
            if postlex is not None and getattr(type(postlex), name, None) is not getattr(
                Indenter, name
            ):
                raise ValueError(
                    f"postlex: a lark.indenter.Indenter that only names its terminals, not {postlex!r}"
                )
        found = read(
            grammar, start, import_paths, g_regex_flags, postlex, source_path, list(specials)
        )
        parser = found.parser
        lexers, lexer_of = _lexers(found)
        self._parser = parser
        self.partials = PartialTokens(
            found.terminals, found.ignored, lexers, postlex, len(specials)
        )
        self._completion = Completion(parser, self.partials, lexer_of)
        self._unit = LarkUnit(self._completion, list(self.specials.values()))
        self.start = self.machine.start
        stuck: set[str] | None = set()
        if self.start is not None:
            stuck = self._completion.taking_all()
        if stuck is not None:
            why = ""
            if stuck:
                takers = [
                    f"{name} {shown(self.partials.terminals[name].pattern)}"
                    for name in sorted(stuck)
                ]
                why = f": no text goes on after terminal {' and '.join(takers)}"
            raise ValueError(
                f"lark parses no text at all with this grammar (start rule {start!r}){why}"
            )

    def __repr__(self) -> str:
        specials = ""
        if self.specials:
            specials = f", specials={self.specials!r}"
        return f"Grammar({shown(self.text)}{specials})"

    @cached_property
    def lark(self) -> Lark:
        """Lark itself with this grammar, for parse trees; made on first use."""
        return Lark(
            self.text, parser="lalr", lexer="contextual", maybe_placeholders=False, **self._options
        )

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        start: str = "start",
        *,
        import_paths: Sequence[Any] = (),
        g_regex_flags: int = 0,
        postlex: Any = None,
        specials: Mapping[str, str | int | Special] = MappingProxyType({}),
    ) -> Grammar:
        """Read a grammar from a file. Relative imports are found beside it, and errors begin with its path."""
        options: dict[str, Any] = {"import_paths": import_paths, "g_regex_flags": g_regex_flags}
        options |= {"postlex": postlex, "specials": specials}
        try:
            with open(path, encoding="utf-8") as file:
                return cls(file.read(), start, source_path=os.fspath(path), **options)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    @property
    def special_tokens(self) -> list[str | int]:
        return list(self.specials.values())

    def begin(self, after: Continuation) -> list[Item]:
        return self._unit.begin_token(self._parser.bottom, self.partials.first, after)

    def least_bytes(self, alone: Bools) -> float:
        return self._unit.least_after(self._parser.bottom, self.partials.first, alone)

    def __reduce__(self) -> tuple[Any, ...]:  # a pickle is compiled anew
        return partial(Grammar, **self._options, specials=self.specials), (self.text,)

    def step(self, state: State, byte: int) -> State | None:
        """Return the state after one more byte, or None if the text cannot continue so."""
        return self.machine.step(state, byte)

    def accepts(self, state: State) -> bool:
        """Check whether lark parses the text that led to `state`."""
        return state.accepts


def _lexers(found: Parts) -> tuple[list[tuple[str, ...]], dict[int, int]]:
    """Return lark's contextual lexers, as names of terminals in order; and the lexer of each state of the parser."""
    always = found.ignored | found.always
    numbers = Numbering[int]()
    lexer_of = dict[int, int]()
    for state, bits in found.parser.terminals().items():
        lexer_of[state] = numbers[bits]
    lexers = list[tuple[str, ...]]()
    for bits in numbers.keys_in_order:
        names = list[str]()
        for terminal in found.terminals:
            if terminal.name in always or found.parser.bits.get(terminal.name, 0) & bits:
                names.append(terminal.name)
        lexers.append(tuple(names))
    return lexers, lexer_of
