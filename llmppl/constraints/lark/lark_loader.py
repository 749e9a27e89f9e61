"""Lark's reading of a grammar: its terminals in order, its rules written out, and the tables of its parser.

Lark writes a rule out into all its alternatives: twenty optional symbols in a row make a million of them. Here a rule
that would become too long is written as a deterministic automaton over its symbols, so that no decision comes earlier
than in lark's parser. The automaton's states are rules of their own: a state from which `x` leads to the state `s` has
the alternative `x s`. A *row* of an automaton says whether a text may end at a node, and where its symbols lead.

Source: the grammar loader of lark 1.3.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lark import Tree, load_grammar
from lark.exceptions import GrammarError, LarkError, UnexpectedInput
from lark.grammar import NonTerminal, RuleOptions
from lark.grammar import Terminal as LarkTerminal
from lark.load_grammar import EBNF_to_BNF, GrammarBuilder

from llmppl.constraints.automata.budget import MAX_NFA_STATES
from llmppl.constraints.lark.lalr_tables import Rule, Tables
from llmppl.constraints.lark.terminals import Terminal, join_words, split_keywords
from llmppl.support.graphs import Numbering, postorder, reachable

MAX_WRITTEN_OUT = 1000                              # symbols to which a rule may grow when lark writes it out
MAX_WRITTEN_OUT_IN_NEED = 20_000                    # the same where an automaton is parsed differently
ALLOWED_GROWTH = 4                                  # factor by which every rule may grow
MAX_SYMBOLS = 500_000                               # of a grammar, with all rules written out
MAX_TERMINAL_SYMBOLS = 200_000                      # of all terminals, with the terminals in them written out
MAX_NAME = 10_000                                   # characters; templates that call each other have longer ones
MAX_STATES = 20_000                                 # of the automaton of a rule
MAX_PAIRS = 500_000                                 # of its nodes, compared to find equal alternatives
COUNTED = 10**12                                    # symbols at which counting stops

Row = tuple[bool, dict[Any, int]]
NFA = list[list[tuple[Any, int]]]                   # edges by node; epsilon edges have the symbol None


@dataclass(frozen=True)
class Rules:
    """A grammar as lark reads it: terminals in the lexer's order, the names of the ignored ones, and the alternatives.

    `always` names the terminals that every lexer has. `sizes` maps each rule that is written as an automaton to its
    number of symbols when written out, and `whole` maps the states of these automata to their rule.
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
    """Return a grammar as lark reads it, and the tables of its parser; errors as for `Grammar`."""
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
    """Return the rules and tables of a loaded grammar, with long rules as automata if these are parsed alike."""
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
    """Return the rules and terminals of a loaded grammar; rules of more than `most` symbols become automata."""
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
    """Run lark's step that puts terminals into terminals; GrammarError if they would become too large."""
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
    """Lark's loader, with a bound on the size of terminals."""

    load_grammar = types.FunctionType(
        GrammarBuilder.load_grammar.__code__,
        {**vars(load_grammar), "resolve_term_references": _resolve},
        argdefs=GrammarBuilder.load_grammar.__defaults__,
    )


class _Expander(EBNF_to_BNF):
    """Lark's step from repeats and optionals to alternatives; rules that would grow too long become automata."""

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
        """Return the tree; if it would grow too long, that of an automaton, with few and short alternatives."""
        size = num_symbols(tree)
        if size > self._most and size > ALLOWED_GROWTH * sum(len(part.children) for part in subtrees(tree)):
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
        """Return the alternatives of node 0 of a graph; each node where paths part or meet becomes a rule."""
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


# ---- rules as automata


def subtrees(tree: Any) -> list[Any]:
    """Return the parts of a tree, each once, inner parts first."""
    return postorder([tree], lambda part: [child for child in part.children if isinstance(child, Tree)])


def num_symbols(tree: Any, unfolded: bool = False) -> int:
    """Return how many symbols the alternatives of a tree have, written out; or the tree itself (`unfolded`)."""
    known: dict[int, tuple[int, int]] = {}          # part -> its alternatives, and the symbols in all of them
    for part in subtrees(tree):
        inner = [known.get(id(child), (1, 1)) for child in part.children]
        if unfolded or part.data == "expansions":
            known[id(part)] = sum(n for n, _ in inner), 1 + sum(size for _, size in inner)
            continue
        number, size = 1, 0
        for n, s in inner:
            number, size = min(number * n, COUNTED), min(size * n + s * number, COUNTED)
        known[id(part)] = number, size
    return sum(known[id(tree)])


def automaton(name: str, tree: Any, empty: Any) -> list[Row]:
    """Return the smallest deterministic automaton of a tree's sequences of symbols; node 0 is the start.

    Raises GrammarError if it has more than MAX_STATES nodes, or if lark would find an alternative twice, because
    leaving out the parts in `[]` (`empty`) makes two alternatives equal.
    """
    rows, start = _nondeterministic(name, tree)
    graph = _determinised(name, rows, start, frozenset({0}))
    if any(empty in row for _, row in graph):
        _refuse_twice(name, graph, empty)
        rows = [[(None if symbol == empty else symbol, t) for symbol, t in row.items()] for _, row in graph]
        graph = _determinised(name, rows, 0, frozenset(i for i, (ends, _) in enumerate(graph) if ends))
    return _minimal(graph)


def _nondeterministic(name: str, tree: Any) -> tuple[NFA, int]:
    """Return an automaton with epsilon edges, whose end is node 0, and its start."""
    rows: NFA = [[]]
    known: dict[tuple[int, int], int] = {}

    def new(row: list[tuple[Any, int]]) -> int:
        if len(rows) > MAX_NFA_STATES:
            raise GrammarError(_too_large(name))
        rows.append(row)
        return len(rows) - 1

    def build(part: Any, end: int) -> int:
        if not isinstance(part, Tree):
            return new([(part, end)])
        key = id(part), end
        if key not in known:
            known[key] = kinds[part.data](part.children, end)
        return known[key]

    def in_a_row(parts: list[Any], end: int) -> int:
        return functools.reduce(lambda after, part: build(part, after), reversed(parts), end)

    kinds: dict[str, Callable[[list[Any], int], int]] = {
        "expansions": lambda parts, end: new([(None, build(part, end)) for part in parts]),
        "expansion": in_a_row,
        "alias": lambda parts, end: build(parts[0], end),   # the alias itself comes second
    }

    return rows, build(tree, 0)


def _determinised(name: str, rows: NFA, start: int, ends: frozenset[int]) -> list[Row]:
    def closed(nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(reachable(nodes, lambda node: [t for symbol, t in rows[node] if symbol is None]))

    sets = Numbering([closed([start])])
    graph: list[Row] = []
    for nodes in sets.keys_in_order:                          # grows
        if len(sets) > MAX_STATES:
            raise GrammarError(_too_large(name))
        targets: dict[Any, list[int]] = defaultdict(list)
        for node in sorted(nodes):
            for symbol, t in rows[node]:
                targets[symbol].append(t)
        targets.pop(None, None)
        graph.append((not ends.isdisjoint(nodes), {symbol: sets[closed(some)] for symbol, some in targets.items()}))
    return graph


def _minimal(graph: list[Row]) -> list[Row]:
    """Return the same graph, which is acyclic, with equivalent nodes merged."""
    numbers: Numbering[Any] = Numbering()
    made: dict[int, int] = {}
    found: dict[int, Row] = {}
    for node in postorder([0], lambda node: graph[node][1].values(), key=int):
        ends, row = graph[node]
        own = {symbol: made[t] for symbol, t in row.items()}
        made[node] = numbers[ends, frozenset(own.items())]
        found.setdefault(made[node], (ends, own))
    last = made[0]                                  # node 0 was made last: put it first
    return [(ends, {symbol: last - t for symbol, t in row.items()}) for ends, row in reversed(found.values())]


def _refuse_twice(name: str, graph: list[Row], empty: Any) -> None:
    """Raise lark's error if leaving out two different sets of symbols leaves the same ones, at least one."""
    begun = [t for _, row in graph for symbol, t in row.items() if symbol != empty]
    after_one = set(reachable(begun, lambda node: graph[node][1].values()))   # nodes that a symbol may lead to

    # Two nodes; whether the second must not leave out a symbol here (the paths part); whether a symbol was read.
    def moves(pair: tuple[int, int, bool, bool]) -> Iterator[tuple[int, int, bool, bool]]:
        p, q, parting, read = pair
        row, other = graph[p][1], graph[q][1]
        for symbol in (row.keys() & other.keys()) - {empty}:
            yield row[symbol], other[symbol], False, True
        if empty in row:
            yield row[empty], q, parting, read
        if empty in other and not parting:
            yield p, other[empty], False, read

    parted = [(row[empty], node) for node, (_, row) in enumerate(graph) if empty in row]
    pairs = [(p, node, True, read) for p, node in parted for read in {False, node in after_one}]
    for number, (p, q, _, read) in enumerate(reachable(pairs, moves)):
        if read and graph[p][0] and graph[q][0]:
            raise GrammarError(
                f"Rules defined twice: two of the alternatives of {name} are equal once its [] are left out, which "
                "lark refuses: use ()? for one of them"
            )
        if number > MAX_PAIRS:
            raise GrammarError(_too_large(name))


def _too_large(name: str) -> str:
    return (
        f"rule {name} has too many alternatives that begin alike, even as an automaton (of more than {MAX_STATES:,} "
        "states); give its repeats and groups names of their own"
    )
