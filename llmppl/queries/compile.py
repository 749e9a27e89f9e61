"""Compilation of a query into languages: its prefix strings, and the texts that may follow each of them.

A query becomes a list of *branches*. A branch pairs prefix strings with the language that may follow each of them. No
prefix string belongs to two branches. The language after a prefix depends only on the state of the pattern's automaton
after the prefix, or on several states if edits make one string of several prefixes. Most queries have one branch.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from llmppl.constraints import DFA, Edit, Part, Regex, TooLarge, alignment, within
from llmppl.constraints.json import JsonSchema
from llmppl.constraints.values import constraint_of
from llmppl.support.arguments import count, function, is_type, optional_count
from llmppl.support.graphs import Memo
from llmppl.support.locks import cached_property

MAX_DIFFERENCE_STATES = 100_000  # pattern x ignored strings; above: deferred
MAX_COUNTED_STATES = 200_000  # states of a language that `max_chars` cuts
MAX_PREFIXES = 2000  # strings of a prefix
MAX_PLANNED_STATES = 20_000  # states that are counted for `plan`, at most

Language = str | DFA | JsonSchema | Sequence[str] | Any  # | Any: types such as int | None
Rewrite = Callable[[DFA], DFA]


@dataclass(frozen=True)
class Edits:
    """Edits of total cost at most `max_cost`.

    insert, delete, substitute : int or None
        Cost of one such edit; None forbids it.
    alphabet : str or tuple of str, optional
        Characters to insert or substitute, also as a regex, such as "[a-z ]". Any character if left out.

    Examples
    --------
    >>> insertion = Edits(1, delete=None, substitute=None)
    >>> match = next(search(lm, "Once upon a time there", prefix="Once upon a time", edits=insertion))
    >>> match.text, match.edits
    ('Once upon a time, there', (Edit(kind='insert', place=0, wanted='', found=','),))
    """

    max_cost: int
    insert: int | None = 1
    delete: int | None = 1
    substitute: int | None = 1
    alphabet: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        count("max_cost", self.max_cost, least=0)
        for name in ("insert", "delete", "substitute"):
            optional_count(name, getattr(self, name))

    def __call__(self, language: DFA) -> DFA:
        """Return the strings that such edits make of the strings of a language."""
        return within(language, self.max_cost, **self._kinds()) if self.max_cost else language

    def alignment(self, language: DFA, text: str) -> list[Edit]:
        """Return the edits that make `text` from the nearest string of a language."""
        return alignment(language, text, self.max_cost, **self._kinds()) or []

    def _kinds(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "max_cost"}


EditsLike = int | Edits | Mapping[str, int | Edits]  # {"prefix": 1, "suffix": 2} edits both


@dataclass(frozen=True, eq=False)
class Branch:
    """Prefix strings, and the language that may follow them."""

    prefixes: tuple[str, ...]
    follow: DFA  # read from its state `start`
    start: int
    unedited: DFA  # `follow` itself, or without edits, from its own start

    def texts(self) -> Iterator[str]:
        """Yield the texts that may follow, without edits, the shortest first; none of a language that is large."""
        with contextlib.suppress(TooLarge):
            whole = self.unedited.explore(MAX_PLANNED_STATES)
            start = self.start if self.follow is self.unedited else whole.start
            yield from _from_state(whole, start).enumerate()

    def size(self) -> str:
        """Describe the prefix strings, and the size of the language after them."""
        shown = " | ".join(map(repr, self.prefixes[:2]))
        if len(self.prefixes) > 2:
            shown += " | ..."
        try:
            follow = self.follow.explore(MAX_PLANNED_STATES)
        except ValueError:
            return f"after {shown}: a language of more than {MAX_PLANNED_STATES:,} states, computed during the search"
        kind = "a finite" if follow.is_finite() else "an infinite"
        return f"after {shown}: {kind} language, {follow.num_states} states"


@dataclass(frozen=True)
class Compiled:
    """Compiled query: pattern and prefix after rewriting, edits, `ignore` and `max_chars`."""

    parts: list[Branch]
    ignored: DFA | None  # strings to skip that could not be removed from `follow`
    edits: Edits  # of the part after the prefix

    @cached_property
    def alignments(self) -> Memo[tuple[Branch, bytes], tuple[Edit, ...]]:
        """Edits that make a text after the prefix from the nearest string of the pattern, by part and text."""
        return Memo(lambda key: tuple(self.edits.alignment(key[0].unedited, key[1].decode())))

    @cached_property
    def prefixes(self) -> dict[str, Branch]:
        """Branch of each prefix string."""
        found = dict[str, Branch]()
        for part in self.parts:
            found |= dict.fromkeys(part.prefixes, part)
        return found

    def continues(self) -> bool:
        """Return True if some match begins another."""
        for part in self.parts:
            follow = _from_state(part.follow, part.start).explore()
            if follow.table[follow.accepting].any():
                return True
        return False


def compile_query(
    pattern: Language,
    prefix: Language = "",
    *,
    rewrite: Iterable[Rewrite] = (),
    edits: EditsLike = 0,
    ignore: Language | None = None,
    max_chars: int | None = None,
) -> Compiled:
    """Compile a query into parts; the arguments and errors are those of `Query`."""
    language = _language(pattern, "pattern")
    prefixes = _language([prefix] if isinstance(prefix, str) else prefix, "prefix")
    if not isinstance(rewrite, Iterable) or isinstance(rewrite, str):
        raise TypeError(
            f"rewrite must be a list of functions from DFA to DFA, such as [any_case], not {rewrite!r}"
        )
    for change in rewrite:
        language = function("each of rewrite", change, "any_case")(language)
        if not isinstance(language, DFA):
            raise TypeError(f"rewrite: {change!r} must return a DFA")
    for name, given in (f"{pattern!r}", language), (f"the prefix {prefix!r}", prefixes):
        if given.is_empty():
            raise ValueError(f"{name} matches no text at all")
    regions = dict(edits) if isinstance(edits, Mapping) else {"suffix": edits}
    before = _edits(regions.pop("prefix", 0))
    after = _edits(regions.pop("suffix", 0))
    if regions:
        raise ValueError(f'edits by region are {{"prefix": ..., "suffix": ...}}, not {edits!r}')
    unwanted = None if ignore is None else _language(ignore, "ignore")
    optional_count("max_chars", max_chars, least=0)

    parts = []
    deferred = None
    for states, strings in _split(language, prefixes, before, prefix):
        start = states[0]
        follow = language
        unedited = language
        if len(states) > 1 or after.max_cost or max_chars is not None or unwanted is not None:
            unedited = reduce(DFA.united_with, [_from_state(language, state) for state in states])
            follow = after(unedited)
            if max_chars is not None:
                short = Regex(f"(?s:.{{0,{max_chars}}})")
                follow = follow.explore(MAX_COUNTED_STATES).intersected_with(short)
            if unwanted is not None:
                try:
                    limit = (
                        MAX_DIFFERENCE_STATES // unwanted.explore(MAX_DIFFERENCE_STATES).num_states
                    )
                    follow = follow.explore(limit).without(unwanted)
                except TooLarge:
                    deferred = unwanted
            start = follow.start
        if not follow.is_empty():
            parts.append(Branch(strings, follow, start, unedited))
    if not parts:
        limits = {"ignore": ignore, "max_chars": max_chars}
        named = " and ".join(
            f"{name}={limit!r}" for name, limit in limits.items() if limit is not None
        )
        raise ValueError(f"no text of {pattern!r} is left by {named}")
    return Compiled(parts, deferred, after)


INSTEAD = "enumerate_exact(ConstrainedText(lm, prompt, a | b)), or smc_steer, has the probabilities"


def _language(language: Language, name: str) -> DFA:
    """Return a pattern as an automaton. ValueError if a JSON schema has no DFA that accepts exactly its texts."""
    if is_type(language):
        language = constraint_of(language)
    if isinstance(language, str):
        return Regex(language)
    if isinstance(language, DFA):
        return language
    if isinstance(language, list | tuple):
        return DFA.from_strings(language)
    if not isinstance(language, Part):
        kinds = "a str" if name == "prefix" else "a regular expression (str)"
        raise TypeError(
            f"{name} must be {kinds}, a DFA, a type, a JsonSchema or a list of str, not {language!r}"
        )
    if language.automaton is None or language.has_checks:
        why = "it has no automaton, or checks on the finished text"
        if language.special_tokens:
            token = language.special_tokens[0]
            why = f"a query is about texts, and it has the special token {token!r}: {INSTEAD}"
        if isinstance(language, JsonSchema):
            why = [*language.unmasked, language.fallback_reason][0]
        raise ValueError(f"{name} {language!r} cannot be searched: {why}")
    automaton: DFA = language.automaton
    return automaton


def _edits(edits: int | Edits) -> Edits:
    if isinstance(edits, Edits):
        return edits
    return Edits(count("edits", edits, least=0))


def _from_state(language: DFA, state: int) -> DFA:
    """Return the language that may follow a state."""
    if state == language.start:
        return language
    whole = language.explore()
    return DFA.from_table(whole.table, whole.accepting, state)


def _split(
    language: DFA, prefixes: DFA, edits: Edits, shown: Language
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return the edited prefix strings, grouped by the states of `language` after the strings before the edits."""
    before = defaultdict(list)
    states = defaultdict(list)
    groups = defaultdict(list)
    for text in _listed(prefixes, shown):
        before[language.after(language.start, text.encode())].append(text)
    for text in before.get(0, ()):
        raise ValueError(
            f"the prefix {shown!r} is no prefix of the pattern: no text of it begins with {text!r}. The pattern is a "
            "regular expression that includes the prefix, as in re.escape(prefix) + ' (yes|no)'. A prefix is a text, "
            "unless it is a Regex"
        )
    for state, texts in before.items():
        for text in _listed(edits(DFA.from_strings(texts)), shown):
            states[text].append(state)
    for text, after in states.items():
        groups[tuple(after)].append(text)
    return [(after, tuple(texts)) for after, texts in groups.items()]


def _listed(prefixes: DFA, shown: Language) -> list[str]:
    """Return the prefix strings; a ValueError if they are too many."""
    texts = list(islice(prefixes.enumerate(), MAX_PREFIXES + 1))
    if len(texts) > MAX_PREFIXES:
        raise ValueError(
            f"the prefix {shown!r} has more than {MAX_PREFIXES:,} strings, with its edits: give one with fewer, or "
            'edits of fewer characters, as in {"prefix": Edits(1, alphabet="[a-z ]")}'
        )
    return texts
