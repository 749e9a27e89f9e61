"""Lark's reading of a grammar: its terminals in the order in which its lexer tries them, and its rules written out.

Lark writes a rule out into all its alternatives, so that twenty optional symbols in a row are a million of them. A rule
that would become too long is written as an automaton here, whose states are rules of their own: one from which `x`
leads to the state `s` has the alternative `x s`. The automaton is the deterministic one, so that nothing has to be
decided before lark's parser would decide it.

Words: a *word* is a terminal that is one string. Words that stand in the same places of all rules, and next to each
other in the lexer's order, are read as one terminal, since neither lexer nor parser tells them apart.

Source: the grammar loader of lark 1.3.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lark import Tree, load_grammar
from lark.exceptions import GrammarError, LarkError, UnexpectedInput
from lark.grammar import NonTerminal, RuleOptions
from lark.grammar import Terminal as LarkTerminal
from lark.lexer import PatternStr, TerminalDef
from lark.load_grammar import EBNF_to_BNF, GrammarBuilder

from llmppl.grammar.lalr_tables import Rule, Tables
from llmppl.grammar.lexing import Terminal
from llmppl.languages.dfa import Leftmost
from llmppl.languages.limits import MAX_NFA_STATES, TooLarge
from llmppl.languages.nfa import NFA
from llmppl.languages.regex import parse

WRITTEN_OUT = 1000                                  # symbols to which a rule may grow when lark writes it out
WRITTEN_OUT_AT_MOST = 20_000                        # where an automaton would not do
GROWTH = 4                                          # times, by which it may grow at least
MAX_SYMBOLS = 500_000                               # of a grammar, with all rules written out
MAX_TERMINALS = 200_000                             # symbols of all terminals, with those in them written out
MOST = 10**12                                       # where counting stops
MAX_PARTS = 20_000                                  # states of the automaton of a rule
MANY = 8                                            # words in a row from which on they are read as one terminal
EMPTY = load_grammar._EMPTY


@dataclass(frozen=True)
class Rules:
    """What lark makes of a grammar: terminals in the lexer's order, the names of those ignored, and the alternatives.

    `sizes` says of rules that are written as automata how many symbols they would be, written out, and `whole` of the
    states of these automata which rule they are of.
    """

    terminals: tuple[Terminal, ...]
    ignored: frozenset[str]
    rules: tuple[Rule, ...]
    sizes: dict[str, int]
    whole: dict[str, str]


def read(
    text: str, start: str, import_paths: Sequence[Any], flags: int, postlex: Any, source_path: str | None
) -> tuple[Rules, Tables]:
    """What lark makes of a grammar, and the tables of its parser; errors as for `Grammar`."""
    try:
        loader = _Loader(False, list(import_paths))
        loader.load_grammar(text, source_path or "<string>")
        loaded = loader.build()
        found = _written(loaded, start, flags, postlex, WRITTEN_OUT)
        short = max(found.sizes.values(), default=0) <= WRITTEN_OUT_AT_MOST
        try:
            tables = Tables(found.rules, start, found.whole)
            odd = [name for name in found.sizes if not tables.equals_written_out(name)]
            if not odd:
                return found, tables
        except GrammarError:                        # a collision, perhaps of parts only
            if not found.sizes or not short:
                raise
        if not short:
            raise GrammarError(
                f"rule {odd[0]} has {found.sizes[odd[0]]:,} symbols when its optional parts are written out, and other "
                "rules begin as it does where it may stand; give some of its parts names of their own"
            )
        found = _written(loaded, start, flags, postlex, WRITTEN_OUT_AT_MOST)
        return found, Tables(found.rules, start, found.whole)
    except UnexpectedInput as error:
        raise ValueError(f"grammar: {error}".rstrip() + f"\n\n{error.get_context(text)}") from error
    except FileNotFoundError as error:
        raise ValueError(f"grammar: nothing to import from {error.filename!r}") from error
    except LarkError as error:
        raise ValueError(f"grammar: {error}") from error
    except RecursionError:
        raise ValueError(
            "grammar: groups are nested too deeply for lark to read it; give inner ones names of their own"
        ) from None


def _written(loaded: Any, start: str, flags: int, postlex: Any, most: int) -> Rules:
    """The rules of a loaded grammar, and its terminals; those of more than `most` symbols as automata."""
    expander = _Expander({name: options for name, _, _, options in loaded.rule_defs}, most)
    kept = set(postlex.always_accept) if postlex is not None else set()
    terminals, rules, ignored = _compiler(expander)(loaded, [start], kept)
    if not any(rule.origin.name == start for rule in rules):
        raise GrammarError(f"no rule is named {start!r}, from which a text is to start")
    if missing := set(ignored) - {terminal.name for terminal in terminals}:
        raise GrammarError(f"Ignore terminals are not defined: {missing}")
    alternatives = [
        Rule(str(rule.origin.name), tuple(str(symbol.name) for symbol in rule.expansion), rule.options.priority or 0)
        for rule in rules
    ]
    found = Rules(
        _carved(terminals, flags),
        frozenset(ignored),
        tuple(alternatives),
        expander.sizes,
        expander.whole,
    )
    return found if postlex is not None else _joined(found)


def _compiler(expander: _Expander) -> Any:
    """Lark's `Grammar.compile`, with its rules written out by `expander`."""
    own = {**vars(load_grammar), "EBNF_to_BNF": lambda: expander}
    return types.FunctionType(load_grammar.Grammar.compile.__code__, own)


def _resolve(terms: dict[str, Any]) -> None:
    """Lark's step from the names of terminals to what they stand for; refused where that would be too much."""
    sizes: dict[str, int] = {}
    todo = [(name, False) for name, tree in terms.items() if tree is not None]
    inner: dict[str, list[str]] = {}
    while todo:
        name, done = todo.pop()
        if done:
            own = _size(terms[name], unfolded=True)
            sizes[name] = min(own + sum(sizes.get(part, 0) for part in inner[name]), MOST)
        elif name not in inner:
            values = [part.children[0] for part in _parts(terms[name]) if part.data == "value"]
            inner[name] = [str(v.name) for v in values if isinstance(v, LarkTerminal) and terms.get(v.name) is not None]
            todo.append((name, True))
            todo += [(part, False) for part in inner[name]]
    if sum(sizes.values()) > MAX_TERMINALS:
        worst = max(sizes, key=lambda name: sizes[name])
        raise GrammarError(
            f"terminal {worst} has {sizes[worst]:,} symbols when the terminals in it are written out, and all together "
            f"more than {MAX_TERMINALS:,}: fewer uses of terminals in terminals, or rules instead, would do"
        )
    load_grammar.resolve_term_references(terms)  # type: ignore[no-untyped-call]


class _Loader(GrammarBuilder):
    """Lark's loader, whose terminals cannot grow without a bound."""

    load_grammar = types.FunctionType(
        GrammarBuilder.load_grammar.__code__,
        {**vars(load_grammar), "resolve_term_references": _resolve},
        argdefs=GrammarBuilder.load_grammar.__defaults__,
    )


# ---- rules


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
        if len(self.prefix) > 10_000:
            raise GrammarError(f"templates call each other without an end: {self.prefix[:60]}...")
        given = self._options.get(self.prefix.partition("{")[0])
        return self._shortened(self.prefix, super().transform(tree), given)

    def _add_rule(self, key: Any, name: str, expansions: Any) -> Any:
        return super()._add_rule(key, name, self._shortened(name, expansions, None))  # type: ignore[no-untyped-call]

    def _shortened(self, name: str, tree: Any, options: Any) -> Any:
        """The tree, or where it would be written out into too much, one whose alternatives are few and short."""
        size = _size(tree)
        if size > max(self._most, GROWTH * _leaves(tree)):
            self.sizes[name], self.whole[name] = size, name
            graph = _minimal(_automaton(name, tree))
            return self._rules_of(name, graph, RuleOptions(priority=options.priority if options else None))
        self._left -= size
        if self._left < 0:
            raise GrammarError(
                f"more than {MAX_SYMBOLS:,} symbols when its rules are written out, at rule {name}: fewer repeats and "
                "optional parts would do"
            )
        return tree

    def _rules_of(self, name: str, graph: list[_Row], options: RuleOptions) -> Any:
        """The alternatives of node 0 of a graph; each node where ways part or meet becomes a rule."""
        arrivals = [0] * len(graph)
        for _, row in graph:
            for target in row.values():
                arrivals[target] += 1
        plain = [not ends and len(row) == 1 and n < 2 for (ends, row), n in zip(graph, arrivals, strict=True)]
        named: dict[int, Any] = {}

        def after(node: int) -> list[Any]:
            symbols = []
            while plain[node]:
                ((symbol, node),) = graph[node][1].items()
                symbols.append(symbol)
            if graph[node][1]:
                if node not in named:
                    named[node] = NonTerminal(self._name_rule("rest"))
                    self.whole[named[node].name] = name
                    todo.append(node)
                symbols.append(named[node])
            return symbols

        def alternatives(node: int) -> Any:
            ends, row = graph[node]
            found = [Tree("expansion", [symbol, *after(target)]) for symbol, target in row.items()]
            return Tree("expansions", [*found, *([Tree("expansion", [])] if ends else [])])

        todo: list[int] = []
        tree = alternatives(0)
        for node in todo:                           # grows
            self.new_rules.append((named[node].name, alternatives(node), options))
        return tree


_Row = tuple[bool, dict[Any, int]]                  # whether a text may end at a node, and its edges


def _parts(tree: Any) -> list[Any]:
    """The parts of a tree, each once, those inside before those around them."""
    order, todo, seen = [], [(tree, False)], set[int]()
    while todo:
        part, done = todo.pop()
        if done:
            order.append(part)
        elif id(part) not in seen:
            seen.add(id(part))
            todo.append((part, True))
            todo += [(child, False) for child in part.children if isinstance(child, Tree)]
    return order


def _size(tree: Any, unfolded: bool = False) -> int:
    """How many symbols the alternatives of a tree have, written out; or the tree itself, if parts are not shared."""
    known: dict[int, tuple[int, int]] = {}          # part -> its alternatives, and the symbols in all of them
    for part in _parts(tree):
        inner = [known[id(c)] if isinstance(c, Tree) else (1, 1) for c in part.children]
        if unfolded or part.data == "expansions":
            known[id(part)] = sum(n for n, _ in inner), 1 + sum(size for _, size in inner)
            continue
        number, size = 1, 0
        for n, s in inner:
            number, size = min(number * n, MOST), min(size * n + s * number, MOST)
        known[id(part)] = number, size
    return sum(known[id(tree)])


def _leaves(tree: Any) -> int:
    return sum(len(part.children) for part in _parts(tree))


def _automaton(name: str, tree: Any) -> list[_Row]:
    """The deterministic automaton of the symbols that a tree stands for; node 0 is the start.

    Raises
    ------
    GrammarError
        If it has more than MAX_PARTS nodes; if lark would find an alternative twice, where something left out by `[]`
        makes two of them equal.
    """
    rows: list[list[tuple[Any, int]]] = [[]]        # an automaton with free edges (None); node 0 is the end
    known: dict[tuple[int, int], int] = {}

    def build(part: Any, end: int) -> int:
        if not isinstance(part, Tree):
            rows.append([(part, end)])
            return len(rows) - 1
        key = id(part), end
        if key not in known:
            if len(rows) > MAX_NFA_STATES:
                raise GrammarError(_too_large(name))
            if part.data == "expansions":
                entries = [build(child, end) for child in part.children]
                rows.append([(None, entry) for entry in entries])
                known[key] = len(rows) - 1
            else:                                   # an expansion, or an alias: what it is called comes second
                children = part.children[:1] if part.data == "alias" else part.children
                entry = end
                for child in reversed(children):
                    entry = build(child, entry)
                known[key] = entry
        return known[key]

    start = build(tree, 0)
    graph = _determinised(name, rows, start, frozenset({0}))
    if any(symbol == EMPTY for _, row in graph for symbol in row):
        _refuse_twice(name, graph)
        rows = [[(None if symbol == EMPTY else symbol, t) for symbol, t in row.items()] for _, row in graph]
        graph = _determinised(name, rows, 0, frozenset(i for i, (ends, _) in enumerate(graph) if ends))
    return graph


def _determinised(name: str, rows: list[list[tuple[Any, int]]], start: int, ends: frozenset[int]) -> list[_Row]:
    def closed(nodes: Iterable[int]) -> frozenset[int]:
        found = list(dict.fromkeys(nodes))
        seen = set(found)
        for node in found:                          # grows
            new = [t for symbol, t in rows[node] if symbol is None and t not in seen]
            seen.update(new)
            found += new
        return frozenset(found)

    sets = [closed([start])]
    number = {sets[0]: 0}
    graph: list[_Row] = []
    for nodes in sets:                              # grows
        targets: dict[Any, list[int]] = {}
        for node in sorted(nodes):
            for symbol, t in rows[node]:
                if symbol is not None:
                    targets.setdefault(symbol, []).append(t)
        row = {}
        for symbol, some in targets.items():
            key = closed(some)
            row[symbol] = number.setdefault(key, len(sets))
            if row[symbol] == len(sets):
                sets.append(key)
        if len(sets) > MAX_PARTS:
            raise GrammarError(_too_large(name))
        graph.append((not ends.isdisjoint(nodes), row))
    return graph


def _minimal(graph: list[_Row]) -> list[_Row]:
    """The same without nodes from which the same goes on; it has no circles."""
    number: dict[Any, int] = {}
    made: dict[int, int] = {}
    left = {i: len(set(row.values())) for i, (_, row) in enumerate(graph)}
    before: dict[int, set[int]] = {}
    for i, (_, row) in enumerate(graph):
        for t in row.values():
            before.setdefault(t, set()).add(i)
    order = [i for i, n in left.items() if not n]
    found: list[_Row] = []
    for i in order:                                 # grows; after all that a node leads to
        ends, row = graph[i]
        own = {symbol: made[t] for symbol, t in row.items()}
        key = ends, frozenset(own.items())
        if key not in number:
            number[key] = len(found)
            found.append((ends, own))
        made[i] = number[key]
        for b in before.get(i, ()):
            left[b] -= 1
            if not left[b]:
                order.append(b)
    top = made[0]                                   # made last: put it first
    place = {top: 0} | {i: i + 1 for i in range(len(found)) if i < top}
    return [
        (ends, {symbol: place[t] for symbol, t in row.items()})
        for ends, row in [found[top], *found[:top], *found[top + 1 :]]
    ]


def _refuse_twice(name: str, graph: list[_Row]) -> None:
    """Raise lark's error where two ways of leaving symbols out leave the same ones, and not none."""
    some = set[int]()                               # nodes before which a symbol may stand
    todo = list(range(len(graph)))
    for i in todo:                                  # grows
        new = {t for symbol, t in graph[i][1].items() if i in some or symbol != EMPTY} - some
        some |= new
        todo += new
    # Two nodes, whether the second must not leave out here (there the ways part), whether a symbol has been read.
    parted = [(row[EMPTY], i) for i, (_, row) in enumerate(graph) if EMPTY in row]
    pairs = [(p, i, True, read) for p, i in parted for read in {False, i in some}]
    seen = set(pairs)
    for p, q, parting, read in pairs:               # grows
        (ends, row), (other_ends, other) = graph[p], graph[q]
        if ends and other_ends and read:
            raise GrammarError(
                f"Rules defined twice: two of the alternatives of {name} are equal when what its [] leave out is gone; "
                "lark refuses that: use ()? for one of them"
            )
        moves = [(t, other[symbol], False, True) for symbol, t in row.items() if symbol != EMPTY and symbol in other]
        if EMPTY in row:
            moves.append((row[EMPTY], q, parting, read))
        if EMPTY in other and not parting:
            moves.append((p, other[EMPTY], False, read))
        unseen = [move for move in dict.fromkeys(moves) if move not in seen]
        seen.update(unseen)
        pairs += unseen
        if len(seen) > MAX_SYMBOLS:
            raise GrammarError(_too_large(name))


def _too_large(name: str) -> str:
    return (
        f"rule {name} has too many alternatives that begin alike, even as an automaton (of more than {MAX_PARTS:,} "
        "states); give its repeats and groups names of their own"
    )


# ---- terminals


def _carved(terminals: Sequence[TerminalDef], flags: int) -> tuple[Terminal, ...]:
    """The terminals in the order in which lark's lexers try them, with lark's rule of keywords.

    A word is carved out of a regular expression that matches it as a whole: that text is the word then. Where both may
    stand, the word is no alternative of its own.
    """
    for terminal in terminals:
        _check(terminal, flags)
    _check_together(terminals, flags)
    ranked = sorted(terminals, key=lambda t: (-t.priority, -t.pattern.max_width, -len(t.pattern.value), t.name))
    nfas = {t.name: _nfa(t, flags) for t in ranked}
    if sum(map(len, nfas.values())) > MAX_NFA_STATES:
        worst = max(nfas, key=lambda name: len(nfas[name]))
        raise TooLarge(
            f"terminal {worst}, beside the others,",
            f"{len(nfas[worst]):,} states, and more than {MAX_NFA_STATES:,} together",
            "fewer or smaller counted repeats would work",
        )
    words = [(t, t.pattern.value.encode()) for t in ranked if isinstance(t.pattern, PatternStr)]
    embedded: dict[str, set[str]] = {t.name: set() for t in ranked}
    found = []
    for t in ranked:
        carved = []
        if not isinstance(t.pattern, PatternStr) and words:
            machine = Leftmost(nfas[t.name])
            carved = [word for word, data in words if word.priority == t.priority and _matches_whole(machine, data)]
        for word in carved:
            if set(word.pattern.flags) <= set(t.pattern.flags):
                embedded[word.name].add(t.name)
        plain = isinstance(t.pattern, PatternStr) and not t.pattern.flags and not flags
        found.append(
            Terminal(
                t.name,
                t.pattern.to_regexp(),
                nfas[t.name],
                (t.pattern.value,) if plain else (),
                tuple(word.name for word in carved),
            )
        )
    return tuple(replace(t, embedded=frozenset(embedded[t.name])) for t in found)


def _check(terminal: TerminalDef, flags: int) -> None:
    pattern = terminal.pattern.to_regexp()
    try:
        re.compile(pattern, flags)
    except re.error as error:
        where = "" if error.pos is None else f"\n    {pattern}\n    {' ' * error.pos}^"
        raise ValueError(f"terminal {terminal.name}: {error}{where}") from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"terminal {terminal.name}: {error or 'too deeply nested'}") from None
    if terminal.pattern.min_width == 0:
        raise ValueError(f"terminal {terminal.name}: {pattern!r} matches the empty text, which lark's lexers refuse")


def _check_together(terminals: Sequence[TerminalDef], flags: int) -> None:
    """Raise a ValueError if lark cannot have the terminals as alternatives of one regular expression."""
    named = [t for t in terminals if re.search(r"\(\?(P<|[aiLmsux]+\))", t.pattern.to_regexp())]
    try:
        re.compile("|".join(f"(?P<{t.name}>{t.pattern.to_regexp()})" for t in named), flags)
    except re.error as error:
        names = ", ".join(terminal.name for terminal in named)
        raise ValueError(f"lark cannot put terminals into one regular expression ({names}): {error}") from error


def _nfa(terminal: TerminalDef, flags: int) -> NFA:
    try:
        return parse(terminal.pattern.to_regexp(), flags)
    except ValueError as error:
        raise ValueError(f"terminal {terminal.name}: {error}") from error


def _matches_whole(machine: Leftmost, data: bytes) -> bool:
    """Whether the match that `re` finds at the beginning of a text is all of it."""
    state: int | None = machine.start
    matched = None
    for at, byte in enumerate(data, 1):
        state = machine.step(state, byte) if state else None
        if state is None:
            return False
        since = machine.matched(state)
        matched = matched if since is None else at - since
    since = machine.at_end(state or 0)
    return (matched if since is None else len(data) - since) == len(data)


def _joined(found: Rules) -> Rules:
    """The same with words in a row as one terminal, where no rule and no regular expression tells them apart."""
    places: dict[str, set[int]] = {t.name: set() for t in found.terminals if t.words}
    numbers: dict[Any, int] = {}
    for rule in found.rules:
        for i, name in enumerate(rule.expansion):
            if name in places:
                hole = (*rule.expansion[:i], None, *rule.expansion[i + 1 :]) if len(rule.expansion) < 50 else object()
                places[name].add(numbers.setdefault((rule.origin, rule.priority, hole), len(numbers)))
    hosts: dict[str, list[str]] = {}
    for terminal in found.terminals:
        for name in terminal.carved:
            hosts.setdefault(name, []).append(terminal.name)
    runs: list[list[Terminal]] = []
    before: Any = None
    for terminal in found.terminals:
        own = None
        if terminal.words and terminal.name not in found.ignored:
            own = frozenset(places[terminal.name]), tuple(hosts.get(terminal.name, ())), terminal.embedded
        if own is None or own != before:
            runs.append([])
        runs[-1].append(terminal)
        before = own
    first = {terminal.name: run[0].name for run in runs if len(run) >= MANY for terminal in run}
    if not first:
        return found

    def renamed(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(first.get(name, name) for name in names))

    terminals = []
    for run in runs:
        if run[0].name in first:
            words = tuple(dict.fromkeys(word for terminal in run for word in terminal.words))
            pattern = "|".join(map(re.escape, words))
            terminals.append(replace(run[0], pattern=pattern, nfa=parse(pattern, to_end=True), words=words))
        else:
            terminals += [replace(terminal, carved=renamed(terminal.carved)) for terminal in run]
    rules = dict.fromkeys(
        rule._replace(expansion=tuple(first.get(name, name) for name in rule.expansion)) for rule in found.rules
    )
    return replace(found, terminals=tuple(terminals), rules=tuple(rules))
