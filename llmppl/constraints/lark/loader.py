"""Lark's reading of a grammar: its terminals in the lexer's order, and its rules written out.

Lark writes a rule out into all its alternatives, a terminal into one regular expression, and a template into a rule for
each use: twenty optional symbols in a row make a million alternatives. Grammars that would grow beyond a bound are
refused before lark writes them out.

Source: the grammar loader of lark 1.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lark import Tree, load_grammar
from lark.exceptions import GrammarError, LarkError, UnexpectedInput
from lark.grammar import NonTerminal
from lark.grammar import Terminal as LarkTerminal
from lark.load_grammar import GrammarBuilder

from llmppl.constraints.lark.parser import IndentedParser, Parser, Rule, derived
from llmppl.constraints.lark.terminals import Terminal, special_terminal, split_keywords
from llmppl.support.graphs import postorder, reachable

MAX_SYMBOLS = 150_000  # of a grammar, with all rules written out
MAX_TERMINAL_SYMBOLS = 40_000  # of all terminals, with the terminals in them written out
MAX_TERMINALS = 1_000  # lark's tables of a repeat of words are quadratic in their number
MAX_UNSEEN = 10  # terminals of several terminals that need no count
MAX_TEMPLATES = 5_000  # rules that templates make
MAX_NAME = 5_000  # characters of the name of such a rule
COUNTED = 10**12  # symbols at which counting stops

Sizes = tuple[int, int]  # the number of alternatives, and of the symbols in all of them


@dataclass(frozen=True)
class Parts:
    """A grammar as lark reads it: terminals in the lexer's order, the names of the ignored ones, and the parser.

    `always` names the terminals that every lexer has.
    """

    terminals: Sequence[Terminal]
    ignored: frozenset[str]
    always: frozenset[str]
    parser: Parser


def read(
    text: str,
    start: str,
    import_paths: Sequence[Any],
    flags: int,
    postlex: Any,
    source_path: str | None,
    specials: Sequence[str],
) -> Parts:
    """Return a grammar as lark reads it; errors as for `Grammar`."""
    try:
        loader = _Loader(False, list(import_paths))
        loader.load_grammar(text, source_path or "<string>")
        return _written_out(loader.build(), start, flags, postlex, specials)
    except UnexpectedInput as error:
        raise ValueError(f"grammar: {error}".rstrip() + f"\n\n{error.get_context(text)}") from error
    except FileNotFoundError as error:
        raise ValueError(f"grammar: nothing to import from {error.filename!r}") from error
    except LarkError as error:
        how = ""
        if "::=" in text:
            how = "\nlark writes a rule as start: ..., not as root ::= ..."
        raise ValueError(f"grammar: {error}{how}") from error
    except AssertionError as error:
        raise ValueError(
            "grammar: a terminal that is declared may stand in rules, not in other terminals"
        ) from error
    except RecursionError:
        raise ValueError(
            "grammar: groups or rules are nested too deeply for lark to read it; give inner groups names of their own, "
            "and repeat by + or *"
        ) from None


def _written_out(
    loaded: load_grammar.Grammar, start: str, flags: int, postlex: Any, specials: Sequence[str]
) -> Parts:
    """Return the terminals and the parser of a loaded grammar."""
    unmade = _unmade(loaded, postlex, specials)
    _check_templates(loaded.rule_defs)
    _check_sizes(loaded.rule_defs)
    always = frozenset[str]()
    if postlex is not None:
        always = frozenset(postlex.always_accept)
    definitions, alternatives, ignored = loaded.compile([start], set(always))
    if len(definitions) > MAX_TERMINALS:
        raise GrammarError(
            f'{len(definitions):,} terminals, more than {MAX_TERMINALS:,}: one for all, WORD: "a" | "b", would do'
        )
    if not any(rule.origin.name == start for rule in alternatives):
        raise GrammarError(f"no rule is named {start!r}, from which a text is to start")
    missing = set(ignored).difference(terminal.name for terminal in definitions)
    if missing:
        raise GrammarError(f"Ignore terminals are not defined: {missing}")
    rules = [
        Rule(each.origin, each.expansion, each.order, None, each.options) for each in alternatives
    ]
    _check_unmade(rules, unmade)
    _check_ends(rules, start, set(ignored))
    terminals = split_keywords(definitions, flags)
    terminals += [special_terminal(name, number) for number, name in enumerate(specials)]
    if postlex is None:
        parser = Parser(rules, start)
    else:
        parser = IndentedParser(rules, start, postlex)
    return Parts(terminals, frozenset(ignored), always, parser)


def _unmade(loaded: load_grammar.Grammar, postlex: Any, specials: Sequence[str]) -> set[str]:
    """Return the declared terminals that neither special tokens nor an indenter make.

    GrammarError if a special token is no declared terminal, or if a rule is declared.
    """
    for name, _, tree, _ in loaded.rule_defs:
        if tree is None:
            raise GrammarError(
                f"%declare {name} declares a rule; a name in capitals, {name.upper()}, is a terminal"
            )
    declared = {name for name, (tree, _) in loaded.term_defs if tree is None}
    if postlex is not None:
        declared -= {postlex.NL_type, postlex.INDENT_type, postlex.DEDENT_type}
    for name in specials:
        if name not in declared:
            raise GrammarError(
                f"specials has {name!r}: `%declare {name}` and no definition of it would work"
            )
    return declared.difference(specials)


def _check_unmade(rules: Sequence[Rule], unmade: set[str]) -> None:
    """Raise GrammarError if a rule has a declared terminal that nothing makes."""
    for rule in rules:
        for symbol in rule.expansion:
            if symbol.name in unmade:
                raise GrammarError(
                    f"terminal {symbol.name} is declared, and stands for nothing; a definition of it, or a special "
                    f'token, Grammar(..., specials={{"{symbol.name}": "<|im_end|>"}}), would work'
                )


def _check_ends(rules: Sequence[Rule], start: str, ignored: set[str]) -> None:
    """Raise GrammarError if the start rule has no finite sequence of terminals that reach the parser."""
    read = dict[Any, float]()
    used = set[str]()
    for rule in rules:
        for symbol in rule.expansion:
            if symbol.name in ignored:
                used.add(symbol.name)
            elif symbol.is_term:
                read[symbol] = 0
    if NonTerminal(start) not in derived(rules, read):
        why = "never end"
        if used:
            why = f"want {', '.join(sorted(used))}, which %ignore drops"
        raise GrammarError(
            f"lark parses no text at all with this grammar (start rule {start!r}): its rules {why}"
        )


def _subtrees(tree: Any) -> list[Any]:
    return [child for child in tree.children if isinstance(child, Tree)]


class _Loader(GrammarBuilder):
    """Lark's loader, with a bound on the size of terminals: it copies terminals into terminals."""

    def _define(self, name: str, is_term: bool, exp: Any, *options: Any, **more: Any) -> None:
        super()._define(name, is_term, exp, *options, **more)  # type: ignore[no-untyped-call]
        inside = dict[str, list[str]]()  # the terminals in each, as often as they are named
        num_nested = 0
        for each, definition in self._definitions.items():
            if definition.is_term and definition.tree is not None:
                parts = definition.tree.scan_values(lambda part: isinstance(part, LarkTerminal))
                inside[each] = [str(part.name) for part in parts]
                num_nested += len(inside[each]) > 1
        if is_term and num_nested > MAX_UNSEEN:
            self._check_terminals(inside)

    def _check_terminals(self, inside: dict[str, list[str]]) -> None:
        def edges(name: str) -> list[str]:
            return [part for part in inside[name] if part in inside]

        sizes = dict[str, int]()
        for name in postorder(inside, edges, key=str):
            size = len(list(self._definitions[name].tree.scan_values(bool)))
            for part in inside[name]:
                size += sizes.get(part, 1)
            sizes[name] = min(size, COUNTED)
        if sum(sizes.values()) > MAX_TERMINAL_SYMBOLS:
            worst = max(sizes, key=sizes.__getitem__)
            raise GrammarError(
                f"terminal {worst} has {sizes[worst]:,} symbols when the terminals in it are written out, and all "
                f"together more than {MAX_TERMINAL_SYMBOLS:,}: fewer uses of terminals in terminals, or rules instead, "
                "would do"
            )


def _check_templates(definitions: Sequence[Any]) -> None:
    """Raise GrammarError if templates make too many rules of each other, or never end."""
    bodies = dict[str, tuple[Sequence[str], list[Any]]]()
    plain = list[tuple[str, tuple[str, ...]]]()
    for name, params, tree, _ in definitions:
        bodies[name] = params, list(tree.find_data("template_usage"))
        if not params:
            plain.append((name, ()))

    def spelled(part: Any, given: dict[str, str]) -> str:
        if isinstance(part, Tree):
            inner = [spelled(child, given) for child in part.children]
            return f"{part.data}{{{','.join(inner)}}}"
        name = str(getattr(part, "name", part))
        return given.get(name, name)

    def uses(call: tuple[str, tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
        params, inner = bodies[call[0]]
        given = dict(zip(params, call[1], strict=True))
        for usage in inner:
            name, *arguments = usage.children
            if str(name.name) in bodies:
                yield str(name.name), tuple([spelled(each, given) for each in arguments])

    for number, (name, arguments) in enumerate(reachable(plain, uses)):
        if number > MAX_TEMPLATES + len(plain) or sum(map(len, arguments)) > MAX_NAME:
            raise GrammarError(
                f"templates call each other without an end, or too often: {name}{{...}}"
            )


def _check_sizes(definitions: Sequence[Any]) -> None:
    """Raise GrammarError if the rules have too many symbols when lark has written them out."""
    total = 0
    for name, _, tree, _ in definitions:
        known: dict[int, Sizes] = {}
        for part in postorder([tree], _subtrees):
            inner = [known.get(id(child), (1, 1)) for child in part.children]
            known[id(part)], more = _sizes(part, inner)
            total += more
        total += known[id(tree)][1]
        if total > MAX_SYMBOLS:
            raise GrammarError(
                f"rule {name} has {total:,} symbols when it is written out in all its alternatives, more than "
                f"{MAX_SYMBOLS:,}: give its repeats, optional parts and groups names of their own"
            )


def _sizes(part: Any, inner: Sequence[Sizes]) -> tuple[Sizes, int]:
    """Return the size of a part of a rule's tree, and of the rules that lark makes for it."""
    if part.data == "expansions":
        return _either(inner), 0
    if part.data == "expansion":
        return _in_a_row(inner), 0
    if part.data == "alias":
        return inner[0], 0
    if part.data not in ("maybe", "expr"):
        return (1, 1), 0
    n, size = inner[0]
    operator = "?"
    if part.data == "expr":
        operator = str(part.children[1])
    if operator == "?":
        return (n + 1, size), 0
    if operator == "*":
        return (2, 1), 2 * size + n
    if operator == "+":
        return (1, 1), 2 * size + n
    most = int(part.children[-1])
    if most >= load_grammar.REPEAT_BREAK_THRESHOLD:  # lark makes rules of factors up to 5 + 5
        return (1, 2), 100 * _in_a_row([(n, size)] * 10)[1]
    numbers = range(int(part.children[2]), most + 1)
    return _either([_in_a_row([(n, size)] * number) for number in numbers]), 0


def _either(parts: Sequence[Sizes]) -> Sizes:
    return sum(n for n, _ in parts), sum(size for _, size in parts)


def _in_a_row(parts: Sequence[Sizes]) -> Sizes:
    number = 1
    size = 0
    for n, more in parts:
        size = min(size * n + more * number, COUNTED)
        number = min(number * n, COUNTED)
    return number, size
