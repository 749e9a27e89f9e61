"""Lark's reading of a grammar: its terminals in order, its rules written out, and the tables of its parser.

Lark writes a rule out into all its alternatives, so that twenty optional symbols in a row are a million of them. A rule
that would become too long is written as an automaton here (`llmppl.constraints.lark.rule_automata`), whose states are rules of
their own: one from which `x` leads to the state `s` has the alternative `x s`.

Source: the grammar loader of lark 1.3.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lark import Tree, load_grammar
from lark.exceptions import GrammarError, LarkError, UnexpectedInput
from lark.grammar import NonTerminal, RuleOptions
from lark.grammar import Terminal as LarkTerminal
from lark.load_grammar import EBNF_to_BNF, GrammarBuilder

from llmppl.constraints.lark.lalr_tables import Rule, Tables
from llmppl.constraints.lark.rule_automata import COUNTED, Row, automaton, num_leaves, num_symbols, subtrees
from llmppl.constraints.lark.terminals import Terminal, join_words, split_keywords
from llmppl.support.graphs import postorder

MAX_WRITTEN_OUT = 1000                              # symbols to which a rule may grow when lark writes it out
MAX_WRITTEN_OUT_IN_NEED = 20_000                    # where an automaton would not do
ALLOWED_GROWTH = 4                                  # times, by which it may grow at least
MAX_SYMBOLS = 500_000                               # of a grammar, with all rules written out
MAX_TERMINAL_SYMBOLS = 200_000                      # of all terminals, with those in them written out
MAX_NAME = 10_000                                   # characters; templates that call each other have longer ones

# What is used of lark beyond what it documents, and what for: `name -> why`, in llmppl/grammar only.
LARK_INTERNALS = {
    "lark.load_grammar": "the module whose functions are run here with two of their globals replaced",
    "lark.load_grammar.EBNF_to_BNF": "writes rules out: transform and _add_rule are where one may become an automaton",
    "lark.load_grammar.EBNF_to_BNF.transform": "is called for every rule",
    "lark.load_grammar.EBNF_to_BNF.prefix": "the name of the rule that is written out",
    "lark.load_grammar.EBNF_to_BNF.new_rules": "those that it has become besides",
    "lark.load_grammar.EBNF_to_BNF._add_rule": "is called for every rule that a repeat makes",
    "lark.load_grammar.EBNF_to_BNF._name_rule": "names the rules that the states of an automaton become",
    "lark.load_grammar.Grammar": "a loaded grammar: its rule_defs hold the rules' options",
    "lark.load_grammar.Grammar.compile": "makes terminals and rules of it; run with another EBNF_to_BNF",
    "lark.load_grammar.GrammarBuilder": "loads a grammar and what it imports",
    "lark.load_grammar.GrammarBuilder.load_grammar": "run with another resolve_term_references",
    "lark.load_grammar.GrammarBuilder.build": "gives the loaded grammar",
    "lark.load_grammar.resolve_term_references": "puts terminals into terminals; their size is counted before",
    "lark.load_grammar._EMPTY": "stands for what [] leaves out",
    "lark.grammar.NonTerminal": "a rule's name in a tree",
    "lark.grammar.RuleOptions": "a rule's priority",
    "lark.grammar.Terminal": "a terminal's name in a tree",
    "lark.lexer.TerminalDef": "a terminal that lark has compiled: name, pattern, priority",
    "lark.lexer.PatternStr": "the pattern of a terminal that is a string",
    "lark.indenter.Indenter._process": "must be lark's own: it is run here by columns",
    "lark.indenter.Indenter.handle_NL": "must be lark's own",
}


@dataclass(frozen=True)
class Rules:
    """What lark makes of a grammar: terminals in the lexer's order, the names of those ignored, and the alternatives.

    `always` names the terminals that every lexer has. `sizes` says of rules that are written as automata how many
    symbols they would be, written out, and `whole` of the states of these automata which rule they are of.
    """

    terminals: Sequence[Terminal]
    ignored: frozenset[str]
    always: frozenset[str]
    rules: Sequence[Rule]
    sizes: dict[str, int]
    whole: dict[str, str]


def read(
    text: str, start: str, import_paths: Sequence[Any], flags: int, postlex: Any, source_path: str | None
) -> tuple[Rules, Tables]:
    """What lark makes of a grammar, and the tables of its parser; errors as for `Grammar`."""
    try:
        loader = _Loader(False, list(import_paths))
        loader.load_grammar(text, source_path or "<string>")
        return _compiled(loader.build(), start, flags, postlex)
    except UnexpectedInput as error:
        raise ValueError(f"grammar: {error}".rstrip() + f"\n\n{error.get_context(text)}") from error
    except FileNotFoundError as error:
        raise ValueError(f"grammar: nothing to import from {error.filename!r}") from error
    except LarkError as error:
        how = "\nlark writes a rule as start: ..., not as root ::= ..." if "::=" in text else ""
        raise ValueError(f"grammar: {error}{how}") from error
    except RecursionError:
        raise ValueError(
            "grammar: groups are nested too deeply for lark to read it; give inner ones names of their own"
        ) from None


def _compiled(loaded: load_grammar.Grammar, start: str, flags: int, postlex: Any) -> tuple[Rules, Tables]:
    """The rules and tables of a loaded grammar, long rules as automata if the parser is the same then."""
    found = _written(loaded, start, flags, postlex, MAX_WRITTEN_OUT)
    short = max(found.sizes.values(), default=0) <= MAX_WRITTEN_OUT_IN_NEED
    try:
        tables = Tables(found.rules, start, found.whole)
        odd = next((name for name in found.sizes if not tables.equals_written_out(name)), None)
        if odd is None:
            return found, tables
    except GrammarError:                            # a collision, perhaps of parts only
        if not found.sizes or not short:
            raise
    if not short:
        raise GrammarError(
            f"rule {odd} has {found.sizes[str(odd)]:,} symbols when its optional parts are written out, and other "
            "rules begin as it does where it may stand; give some of its parts names of their own"
        )
    found = _written(loaded, start, flags, postlex, MAX_WRITTEN_OUT_IN_NEED)
    return found, Tables(found.rules, start, found.whole)


def _written(loaded: load_grammar.Grammar, start: str, flags: int, postlex: Any, most: int) -> Rules:
    """The rules of a loaded grammar, and its terminals; those of more than `most` symbols as automata."""
    expander = _Expander({name: options for name, _, _, options in loaded.rule_defs}, most)
    always = frozenset(postlex.always_accept if postlex is not None else ())
    compile = types.FunctionType(
        load_grammar.Grammar.compile.__code__, {**vars(load_grammar), "EBNF_to_BNF": lambda: expander}
    )
    definitions, alternatives, ignored = compile(loaded, [start], set(always))
    if not any(rule.origin.name == start for rule in alternatives):
        raise GrammarError(f"no rule is named {start!r}, from which a text is to start")
    if missing := set(ignored) - {terminal.name for terminal in definitions}:
        raise GrammarError(f"Ignore terminals are not defined: {missing}")
    rules = [
        Rule(str(rule.origin.name), tuple(str(symbol.name) for symbol in rule.expansion), rule.options.priority or 0)
        for rule in alternatives
    ]
    terminals = split_keywords(definitions, flags)
    if postlex is None:
        terminals, rules = join_words(terminals, frozenset(ignored), rules)
    return Rules(terminals, frozenset(ignored), always, rules, expander.sizes, expander.whole)


def _resolve(terms: dict[str, Any]) -> None:
    """Lark's step from the names of terminals to what they stand for; refused where that would be too much."""
    given = {name: tree for name, tree in terms.items() if tree is not None}

    def inside(name: str) -> list[str]:
        values = [part.children[0] for part in subtrees(given[name]) if part.data == "value"]
        return [str(value.name) for value in values if isinstance(value, LarkTerminal) and value.name in given]

    sizes: Counter[str] = Counter()
    for name in postorder(given, inside, key=str):
        size = num_symbols(given[name], unfolded=True) + sum(sizes[part] for part in inside(name))
        sizes[name] = min(size, COUNTED)
    if sizes.total() > MAX_TERMINAL_SYMBOLS:
        (worst, size), *_ = sizes.most_common(1)
        raise GrammarError(
            f"terminal {worst} has {size:,} symbols when the terminals in it are written out, and all together "
            f"more than {MAX_TERMINAL_SYMBOLS:,}: fewer uses of terminals in terminals, or rules instead, would do"
        )
    load_grammar.resolve_term_references(terms)  # type: ignore[no-untyped-call]


class _Loader(GrammarBuilder):
    """Lark's loader, whose terminals cannot grow without a bound."""

    load_grammar = types.FunctionType(
        GrammarBuilder.load_grammar.__code__,
        {**vars(load_grammar), "resolve_term_references": _resolve},
        argdefs=GrammarBuilder.load_grammar.__defaults__,
    )


class _Expander(EBNF_to_BNF):
    """Lark's own step from repeats and optionals to alternatives; rules that would grow too long become automata."""

    def __init__(self, options: dict[str, Any], most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most
        self.sizes: dict[str, int] = {}
        self.whole: dict[str, str] = {}
        self._options = options
        self._left = MAX_SYMBOLS

    def transform(self, tree: Any) -> Any:
        if len(self.prefix) > MAX_NAME:
            raise GrammarError(f"templates call each other without an end: {self.prefix[:60]}...")
        given = self._options.get(self.prefix.partition("{")[0])
        return self._shortened(self.prefix, super().transform(tree), given.priority if given else None)

    def _add_rule(self, key: Any, name: str, expansions: Any) -> Any:
        return super()._add_rule(key, name, self._shortened(name, expansions, None))  # type: ignore[no-untyped-call]

    def _shortened(self, name: str, tree: Any, priority: int | None) -> Any:
        """The tree, or where it would be written out into too much, one whose alternatives are few and short."""
        size = num_symbols(tree)
        if size > self._most and size > ALLOWED_GROWTH * num_leaves(tree):
            self.sizes[name], self.whole[name] = size, name
            return self._rules_of(name, automaton(name, tree, load_grammar._EMPTY), RuleOptions(priority=priority))
        self._left -= size
        if self._left < 0:
            raise GrammarError(
                f"more than {MAX_SYMBOLS:,} symbols when its rules are written out, at rule {name}: fewer repeats and "
                "optional parts would do"
            )
        return tree

    def _rules_of(self, name: str, graph: list[Row], options: RuleOptions) -> Any:
        """The alternatives of node 0 of a graph; each node where ways part or meet becomes a rule."""
        arrivals = Counter(target for _, row in graph for target in row.values())
        plain = [not ends and len(row) == 1 and arrivals[node] < 2 for node, (ends, row) in enumerate(graph)]
        named: dict[int, Any] = {}

        def after(node: int) -> list[Any]:
            symbols = []
            while plain[node]:
                ((symbol, node),) = graph[node][1].items()
                symbols.append(symbol)
            if graph[node][1] and node not in named:
                named[node] = NonTerminal(self._name_rule("rest"))
                self.whole[named[node].name] = name
                todo.append(node)
            return [*symbols, named[node]] if node in named else symbols

        def alternatives(node: int) -> Any:
            ends, row = graph[node]
            found = [Tree("expansion", [symbol, *after(target)]) for symbol, target in row.items()]
            return Tree("expansions", found + [Tree("expansion", [])] * ends)

        todo: list[int] = []
        tree = alternatives(0)
        for node in todo:                           # grows
            self.new_rules.append((named[node].name, alternatives(node), options))
        return tree
