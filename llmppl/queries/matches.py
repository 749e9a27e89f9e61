"""`search`: the strings of a language under a model, in the order or at random as asked."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmppl.arguments import count, flag, function, generator, one_of, optional_count, share
from llmppl.distributions import DecisionRule, Rule
from llmppl.lm import CachedTransformer
from llmppl.queries.best_first import Item, Search
from llmppl.queries.language import Edits, Language, Rewrite, compile_query
from llmppl.queries.sampling import samples
from llmppl.queries.space import Match, Space, Start

STRATEGIES = "shortest_path", "beam", "sample", "local", "distinct"
TOKENIZATIONS = "all", "canonical", "canonical_prefix"
MOST_STATES = 20_000                                    # that a plan counts
ENDS = "eos", "prefix", "boundary"


def search(
    lm: CachedTransformer,
    pattern: Language,
    *,
    prefix: Language = "",
    strategy: str = "shortest_path",
    tokenization: str = "all",
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    rule: DecisionRule | None = None,
    edits: int | Edits | Mapping[str, int | Edits] = 0,
    rewrite: Iterable[Rewrite] = (),
    ignore: Language | None = None,
    end: str = "eos",
    max_tokens: int | None = None,
    max_chars: int | None = None,
    results: str = "strings",
    order: str = "joint",
    prefixes: str = "model",
    max_prefix_chars: int | None = None,
    tolerance: float = 1e-8,
    batch: int = 32,
    max_expansions: int | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> Matches:
    """The strings of a language that a model would write, as they are found.

    Parameters
    ----------
    lm : CachedTransformer
    pattern : str or DFA
        The language, as a regular expression of whole texts; it includes the prefix.
    prefix : str or DFA
        What is given (a regular expression, too: `escape` what is meant literally). No rule applies to it, and each of
        its strings is read as `lm.context(string)`, by itself.
    strategy : str
        "shortest_path": the most probable match first, in exact order. "beam": the `batch` best of a beam search, which
        may miss some. "sample": samples without end that, weighted by `exp(match.log_weight)`, follow the model given
        the language (a particle filter of `batch` particles at a time). "local": samples without weights, each token
        from its law cut to what the language allows, which is ReLM's random search and follows another law.
        "distinct": samples of the model given the language without replacement, in exact order of a Gumbel race.
    tokenization : str
        Of what follows the prefix. "all": any tokens that spell it. "canonical": the tokenizer's own encoding of the
        whole text. "canonical_prefix": ReLM's name for a canonical prefix before any tokens; as every prefix is
        canonical here, the same as "all".
    top_k, top_p, temperature
        The decision rule, as of `Rule`: probabilities are those of a decoder that follows it. It does not apply to the
        prefix.
    rule : callable, optional
        Any other rule, a function from a law to a law; in place of the three.
    edits : int, Edits, or dict
        Texts within so many edits of the pattern, in the part after the prefix; {"prefix": 1, "suffix": 2} edits both.
    rewrite : iterable of functions from DFA to DFA
        Applied to pattern and prefix, in their order and before edits: `any_case`, `any_whitespace`,
        `optional_punctuation`, `synonyms(...)`, or your own.
    ignore : str or DFA, optional
        Strings not to return, matched against the part after the prefix.
    end : str
        What a match is. "eos": the text ends there, and the end counts. "prefix": the text begins so, whatever follows.
        "boundary": the next token leaves the language, and that counts, behind `max_tokens` tokens as well; `max_chars`
        cuts the language itself, so that a text which goes on leaves it.
    max_tokens, max_chars : int, optional
        The longest part after the prefix; an eos does not count. What is longer than the model can read is no match.
    results : str
        "strings": each once, with the sum over all token sequences that spell it, in the order of the sums. "tokens":
        each token sequence by itself. Samples with and without weights are token sequences in any case.
    order : str
        "joint": by the probability of prefix and match. "conditional": of the match given its prefix.
    prefixes : str
        For samples: "model" draws one of the prefix strings by its probability among them, "uniform" evenly (one for
        each block, whose weights then sum to 1); `max_prefix_chars` bounds a prefix that repeats without end.
    tolerance : float
        Spellings of a string are summed until what is left is at most this share of the sum.
    batch : int
        Contexts per round of the language model, width of the beam, particles at a time. The order of
        "shortest_path" does not depend on it.
    max_expansions : int, optional
        Of "shortest_path", "beam" and "distinct": stop after so many next-token laws; `Matches.complete` tells whether
        that was before the end. If left out, 10,000 in a row that bring no match out are an error.
    seed : int, optional
    progress : bool
        Show on stderr what has been looked at.

    Returns
    -------
    Matches
        An iterator of `Match`. It can be stopped at any time; with "sample" and "local" it never ends.

    Raises
    ------
    TypeError, ValueError
        A regular expression that is none (with a caret), an empty language, a prefix that is none of the pattern, a
        language that no tokens spell, or an argument of another type or out of its range.
    ValueError
        From the iterator: no match in 10,000 expansions, with what is left and what would help; no finished sample.
    """
    one_of("strategy", strategy, STRATEGIES)
    one_of("results", results, ("strings", "tokens"))
    one_of("order", order, ("joint", "conditional"))
    one_of("prefixes", prefixes, ("model", "uniform"))
    count("batch", batch)
    limit = optional_count("max_expansions", max_expansions)
    optional_count("max_prefix_chars", max_prefix_chars, least=0)
    share("tolerance", tolerance)
    flag("progress", progress)
    space = space_of(
        lm, pattern, prefix, end, max_tokens, max_chars, tokenization, top_k, top_p, temperature, rule, edits, rewrite,
        ignore,
    )  # fmt: skip
    rng = generator(seed)
    if strategy in ("sample", "local"):
        blocks = _blocks(space, prefixes, max_prefix_chars, rng)
        local, normalise = strategy == "local", prefixes == "uniform"
        return Matches(space, None, samples(space, blocks, batch, rng, local=local, normalise=normalise), progress)
    if strategy == "beam":
        return Matches(space, None, _beam(space, order, batch, limit, results, tolerance), progress)
    if strategy == "distinct" and end == "prefix" and any(part.continues() for part in space.query.parts):
        raise ValueError(
            'strategy="distinct" draws from disjoint events, and with end="prefix" a match here can begin another: '
            'take end="eos" or end="boundary"'
        )
    found = Search(space, order=order, batch=batch, limit=limit, noise=rng if strategy == "distinct" else None)
    found.add_all()
    matches = found.sequences() if results == "tokens" else found.strings(tolerance)
    return Matches(space, found, matches, progress)


class Matches(Iterator[Match]):
    """The matches of a query, as they are found.

    Attributes
    ----------
    stats : Stats
        Of the language model since the query began.
    expansions : int
        Next-token laws that the search has looked at.
    complete : bool
        Whether every match has been found.
    """

    def __init__(self, space: Space, found: Search | None, matches: Iterator[Match], progress: bool) -> None:
        self.space, self._search = space, found
        self._before = replace(space.lm.stats)
        self._matches = _shown(matches, self) if progress else matches
        self.num_matches = 0

    def __next__(self) -> Match:
        match = next(self._matches)
        self.num_matches += 1
        return match

    @property
    def stats(self) -> Any:
        return self.space.lm.stats - self._before

    @property
    def expansions(self) -> int:
        return self.stats.rows if self._search is None else self._search.expansions

    @property
    def complete(self) -> bool:
        return self._search is not None and not self._search.heap

    def plan(self) -> str:
        """The sizes of the automata, and what a step of the search costs."""
        return plan(self.space)

    def __str__(self) -> str:
        return f"{self.num_matches} matches, {self.expansions} expansions"

    def __repr__(self) -> str:
        return f"<Matches: {self.num_matches} so far, {self.expansions} expansions; {self.stats}>"


def plan(space: Space) -> str:
    """What a query comes to, before a language model is asked anything but the prefix."""
    lines = []
    for part in space.query.parts:
        strings = list(itertools.islice(part.prefixes.enumerate(), 3))
        shown = " | ".join(map(repr, strings[:2])) + (" | ..." if len(strings) > 2 else "")
        try:
            follow = part.follow.explore(MOST_STATES)
            size = f"{'a finite' if follow.is_finite() else 'an infinite'} language, {follow.num_states} states"
        except ValueError:
            size = f"a language of more than {MOST_STATES:,} states, worked out as they are met"
        start = Start(strings[0], space.lm.context(strings[0]), 0.0, part)
        tokens = space.allowed(space.root(start)).size
        lines.append(
            f"after {shown}: {size}; {tokens} of {len(space.lm.vocab)} tokens may come first"
        )
    if space.query.ignored is not None:
        lines.append("ignored strings are left out as they are met: the difference would be too large")
    lines.append("every expansion runs one token through the model and keeps its keys and values")
    return "\n".join(lines)


def space_of(
    lm: CachedTransformer,
    pattern: Language,
    prefix: Language,
    end: str,
    max_tokens: int | None,
    max_chars: int | None,
    tokenization: str,
    top_k: int | None,
    top_p: float | None,
    temperature: float,
    rule: DecisionRule | None,
    edits: int | Edits | Mapping[str, int | Edits],
    rewrite: Iterable[Rewrite],
    ignore: Language | None,
) -> Space:
    """The arguments that every query has, checked and compiled."""
    if not isinstance(lm, CachedTransformer):
        raise TypeError(f"a query wants a CachedTransformer first, not {lm!r}")
    one_of("end", end, ENDS)
    one_of("tokenization", tokenization, TOKENIZATIONS)
    if end == "eos" and not lm.vocab.eos_ids:
        raise ValueError('this vocabulary has no eos token, so no text ends: take end="prefix" or end="boundary"')
    optional_count("max_tokens", max_tokens, least=0)
    plain = Rule(temperature, top_k, top_p)
    if rule is not None:
        function("rule", rule, "lambda law: law.top_k(40)")
    if rule is not None and plain != Rule():
        raise ValueError("give a rule, or top_k, top_p and temperature, not both")
    query = compile_query(pattern, prefix, rewrite=rewrite, edits=edits, ignore=ignore, max_chars=max_chars)
    chosen = rule if rule is not None else plain if plain != Rule() else None
    return Space(lm, query, chosen, end, max_tokens, tokenization == "canonical")


def _blocks(space: Space, prefixes: str, most: int | None, rng: np.random.Generator) -> Iterator[list[Start]]:
    """For each block of samples, the prefix strings that it draws from."""
    if prefixes == "uniform":
        language = space.prefixes
        if most is None:
            if not language.is_finite():
                raise ValueError("the prefix has infinitely many strings: max_prefix_chars says how long they may be")
            most = language.explore().num_states
        return ([_start(space, language.sample(rng, most))] for _ in itertools.count())
    starts = space.starts()
    if starts is None:
        raise ValueError('the prefix has too many strings to weigh each: take prefixes="uniform"')
    return itertools.repeat(starts)


def _start(space: Space, prefix: str) -> Start:
    return Start(prefix, space.lm.context(prefix), 0.0, space.part_of(prefix))


def _beam(
    space: Space, order: str, width: int, limit: int | None, results: str, tolerance: float
) -> Iterator[Match]:
    """The best matches of a beam search, the most probable first."""
    search = Search(space, order=order, batch=width, width=width, limit=limit)
    search.add_all()
    matches: list[Item] = []
    while search.heap and not search.given_up():
        search.expand()
        matches += [item for item in search.heap if item.kind == 0]
        open_items = heapq.nsmallest(width, (item for item in search.heap if item.kind == 1))
        matches = heapq.nsmallest(width, matches)
        if len(matches) == width:                       # what goes on only becomes less probable
            open_items = [item for item in open_items if item.cost < matches[-1].cost]
        search.heap = open_items
    if results == "tokens":
        yield from map(search.match, matches)
    else:
        yield from sorted(search.summed(matches, tolerance), key=lambda match: -match.log_joint)


def _shown(matches: Iterator[Match], of: Matches) -> Iterator[Match]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.fields[state]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=None, state=of)          # which is written anew ten times a second
        yield from matches
