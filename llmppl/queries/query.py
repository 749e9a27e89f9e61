"""Query: a question about the strings of a language under a model, the ways to answer it, and reasons for the answer.

query = Query(lm, "The ((cat)|(dog)) .*", prefix="The", end="boundary", rule=Rule(top_k=40))
query.best()      query.samples(seed=0)      query.distinct(seed=0)      query.probability()      query.plan()
"""

import contextlib
import functools
import inspect
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import repeat
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np

from llmppl.constraints.vocabulary import EOS, Token
from llmppl.distributions import NO_RULE, DecisionRule, Rule, logsumexp
from llmppl.lm import ENDS, CachedTransformer, Context, End, TokenDistribution
from llmppl.models.programs import as_context
from llmppl.queries.best_first import DistinctSearch, Search, Space
from llmppl.queries.compile import Compiled, EditsLike, Language, Rewrite, compile_query
from llmppl.queries.matches import Matches
from llmppl.queries.sampling import Probability, bounded, samples
from llmppl.support import arguments
from llmppl.support.arguments import count, generator, one_of, optional_count
from llmppl.support.locks import cached_property
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import warn

Tokenization = Literal["all", "canonical", "canonical_prefix"]
Results = Literal["strings", "tokens"]
Order = Literal["joint", "conditional"]
Prefixes = Literal["model", "uniform"]
ExplainedEnd = Literal["prefix", "eos"]

MAX_LOOKED = 100  # texts that are examined for a token across the prefix's end
MAX_BEGIN = 20  # characters that are examined for a blank before them
FAR_MORE = math.log(100)


class HowProbable(TypedDict, total=False):
    tolerance: float
    max_expansions: int
    particles: int
    runs: int
    batch: int
    seed: int | None
    rng: np.random.Generator | None
    timeout: float | None
    budget: int | None
    progress: bool | None


_OF_PROBABILITY = {
    "tolerance": 1e-3,
    "max_expansions": 2000,
    "particles": 32,
    "runs": 32,
    "batch": 32,
}


@dataclass(frozen=True, eq=False)
class Query:
    """Question about a language of texts with a given prefix, under a language model and a decision rule.

    Parameters
    ----------
    lm : CachedTransformer
    pattern : str, DFA, JsonSchema, a type, or a list of str (the strings)
        The language, as a regular expression of whole texts; it includes the prefix.
    prefix : str, list of str, or DFA
        The given text, several of them, or a `Regex`. No rule applies to it, and each of its at most 2,000 strings is
        read by itself as `lm.context(string)`. It warns if the tokenizer would join its end and a match into one token.
    end : str
        How a match ends. "boundary": the next token leaves the language, and its probability counts, also after
        `max_tokens` tokens; `max_chars` cuts the language itself, so a longer text leaves it. "eos": the text ends
        there, and the probability of the end counts. "prefix": any text may follow.
    rule : Rule, or another function from a distribution to one over the same tokens
        Decision rule of the decoder whose probabilities are computed.
    edits : int, Edits, or dict
        Match texts within so many edits of the pattern, after the prefix; {"prefix": 1, "suffix": 2} edits both.
    rewrite : iterable of functions from DFA to DFA
        Applied to the pattern, in their order and before edits: `any_case`, `synonyms(...)`, or your own.
    ignore : str or DFA, optional
        Strings not to return, matched against the part after the prefix.
    tokenization : str
        Tokens of the part after the prefix. "all": any tokens that spell it. "canonical": the tokenizer's own encoding
        of the whole text. "canonical_prefix": ReLM's name for "all", because every prefix is canonical here.
    max_tokens, max_chars : int, optional
        The longest part after the prefix; an eos does not count. Texts longer than the model can read never match.
    special : bool
        True reads names of special tokens in the prefix as these tokens, False as text.

    Raises
    ------
    TypeError, ValueError
        A bad argument, an empty language, or a prefix with which no string of the pattern begins.

    Examples
    --------
    >>> query = Query(lm, "He was (happy|sad)", prefix="He was", end="prefix")
    >>> round(query.probability().estimate, 4)
    0.0061
    """

    lm: CachedTransformer
    pattern: Language
    _: KW_ONLY
    prefix: Language = ""
    end: End = "boundary"
    rule: DecisionRule = NO_RULE
    edits: EditsLike = 0
    rewrite: Iterable[Rewrite] = ()
    ignore: Language | None = None
    tokenization: Tokenization = "all"
    max_tokens: int | None = None
    max_chars: int | None = None
    special: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lm, CachedTransformer):
            raise TypeError(f"a query wants a CachedTransformer first, not {self.lm!r}")
        one_of("end", self.end, ENDS)
        one_of("tokenization", self.tokenization, get_args(Tokenization))
        if self.end == "eos" and not self.lm.vocab.eos_ids:
            raise ValueError(
                'this vocabulary has no eos token, so no text ends: take end="prefix" or end="boundary"'
            )
        optional_count("max_tokens", self.max_tokens, least=0)
        arguments.function("rule", self.rule, "Rule(top_k=40)")
        for part in self.compiled.parts:  # raises the errors of a wrong pattern now
            warn_of_seam(self.lm, part.prefixes[0], part.texts())

    @cached_property
    def compiled(self) -> Compiled:
        """Pattern and prefix as languages."""
        return compile_query(
            self.pattern,
            self.prefix,
            rewrite=self.rewrite,
            edits=self.edits,
            ignore=self.ignore,
            max_chars=self.max_chars,
        )

    @cached_property
    def space(self) -> Space:
        """Search space of the query."""
        canonical = self.tokenization == "canonical"
        return Space(
            self.lm, self.compiled, self.rule, self.end, self.max_tokens, canonical, self.special
        )

    # ---- answers

    def best(
        self,
        *,
        results: Results = "strings",
        order: Order = "joint",
        tolerance: float = 1e-8,
        batch: int = 32,
        max_expansions: int | None = None,
        progress: bool | None = None,
    ) -> Matches:
        """Search the matches in the order of their probability; the iterator can be stopped at any time.

        Parameters
        ----------
        results : str
            "strings": each string once, with the sum over all token sequences that spell it, in the order of the sums.
            "tokens": each token sequence by itself.
        order : str
            "joint": by the probability of prefix and match. "conditional": by that of the match given its prefix.
        tolerance : float
            Stop summing the spellings of a string when the rest is at most this share of the sum.
        batch : int
            Contexts in a round of the language model; the order does not depend on it.
        max_expansions : int, optional
            Stop after so many next-token distributions. If left out, the iterator raises a ValueError after 10,000 in a
            row without a match.
        progress : bool, optional
            Show on stderr the number of matches and expansions; if left out, only on a terminal.
        """
        return self._matches(Search, results, order, tolerance, batch, max_expansions, progress)

    def distinct(
        self,
        *,
        results: Results = "strings",
        order: Order = "joint",
        tolerance: float = 1e-8,
        batch: int = 32,
        max_expansions: int | None = None,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> Matches:
        """Draw matches without replacement from the model given the language, in the exact order of a Gumbel race.

        The other parameters are those of `best`. ValueError if one match can begin another: events must be disjoint.
        """
        if self.end == "prefix" and self.compiled.continues():
            raise ValueError(
                'distinct samples are of disjoint events, and with end="prefix" a match here can begin another: '
                'take end="eos" or end="boundary"'
            )
        kind = functools.partial(DistinctSearch, rng=generator(seed, rng))
        return self._matches(kind, results, order, tolerance, batch, max_expansions, progress)

    def _matches(
        self,
        kind: Callable[..., Search],
        results: Results,
        order: Order,
        tolerance: float,
        batch: int,
        max_expansions: int | None,
        progress: bool | None,
    ) -> Matches:
        one_of("results", results, get_args(Results))
        one_of("order", order, get_args(Order))
        arguments.probability("tolerance", tolerance)
        optional_count("max_expansions", max_expansions)
        search = kind(self.space, order, count("batch", batch), max_expansions)
        search.add_all()
        matches = search.strings(tolerance)
        if results == "tokens" or self.space.only_canonical:  # each string has one sequence
            matches = search.sequences()
        return Matches(self.lm, matches, progress, search)

    def samples(
        self,
        *,
        local: bool = False,
        prefixes: Prefixes = "model",
        particles: int = 32,
        seed: int | None = None,
        rng: np.random.Generator | None = None,
        progress: bool | None = None,
    ) -> Matches:
        """Draw token sequences without end; weighted by `exp(match.log_weight)`, they follow the model.

        Parameters
        ----------
        local : bool
            Draw each token from its distribution restricted to the language, without weights. This is ReLM's random
            search, and follows another distribution.
        prefixes : str
            "model" draws one of the prefix strings by its probability among them, "uniform" evenly (one per block; the
            weights of a block then sum to 1).
        particles : int
            Number of samples in a block. Samples of one block are not independent.
        """
        one_of("prefixes", prefixes, get_args(Prefixes))
        rng = generator(seed, rng)
        particles = count("particles", particles)
        uniform = prefixes == "uniform"
        texts = [*self.compiled.prefixes]
        drawn_evenly = ([self.space.start(texts[rng.integers(len(texts))])] for _ in repeat(None))
        starts = drawn_evenly if uniform else repeat(self.space.starts())
        drawn = samples(self.space, starts, particles, rng, local=local, normalise=uniform)
        return Matches(self.lm, drawn, progress)

    @list_options(HowProbable, _OF_PROBABILITY)
    def probability(self, **how: Unpack[HowProbable]) -> Probability:
        """Compute the probability that the text after the prefix is in the language, with the given `end`.

        If the prefix has several strings, one is drawn by its own probability among them. With end="prefix", the event
        is that the text begins with a match, at a border of tokens. If a text begins with several matches, the shortest
        one counts, and the result is marked so.

        Parameters
        ----------
        tolerance : float
            Stop when the bounds differ by at most this share of the upper one.
        max_expansions : int
            Stop after so many next-token distributions; 0 leaves the bounds as they are at the start.
        particles, runs : int
            Size and number of the particle filters for `estimate`; with 0 runs, it and its error are NaN. The filters
            miss matches that end 256 or more tokens after the part that was searched. The error is unreliable if few
            particles find a match; the bounds always hold.
        timeout, budget : float and int, optional
            Seconds, and tokens that the language model runs, half of them for the search and half for the filters. The
            bounds are then wider. Filters that did not end give no estimate.
        progress : bool, optional
            Show the bounds so far on stderr; if left out, only on a terminal.
        """
        check_options("probability", how, HowProbable.__annotations__)
        given: dict[str, Any] = _OF_PROBABILITY | how
        tolerance = arguments.probability("tolerance", given["tolerance"])
        particles = count("particles", given["particles"])
        runs = count("runs", given["runs"], least=0)
        max_expansions = count("max_expansions", given["max_expansions"], least=0)
        starts = self.space.starts()
        space = replace(self.space, first=self.end == "prefix" and self.compiled.continues())
        log_total = logsumexp([start.log_prob for start in starts])
        search = Search(space, "joint", count("batch", given["batch"]), max_expansions)
        for start in starts:
            search.add(start._replace(log_prob=start.log_prob - log_total))
        rng = generator(given.get("seed"), given.get("rng"))
        return bounded(
            search,
            tolerance,
            particles,
            runs,
            rng,
            timeout=given.get("timeout"),
            budget=given.get("budget"),
            progress=given.get("progress"),
        )

    def plan(self) -> str:
        """Describe the compiled query; the language model reads nothing but prefixes."""
        lines = []
        if self.compiled.ignored is not None:
            lines.append("ignored strings are left out during the search")
        for part in self.compiled.parts:
            root = self.space.root(self.space.start(part.prefixes[0]))
            num_tokens = f"{self.space.allowed(root).size} of {len(self.lm.vocab)} tokens"
            lines.append(f"{part.size()}; {num_tokens} may come first")
        return "\n".join(lines)


class QueryOptions(TypedDict, total=False):
    """Options of `Query`.

    Examples
    --------
    >>> options: QueryOptions = {"prefix": "He was", "end": "prefix"}
    >>> [match.text for match in search(lm, "He was (happy|sad)", **options)]
    ['He was happy', 'He was sad']
    """

    prefix: Language
    end: End
    rule: DecisionRule
    edits: EditsLike
    rewrite: Iterable[Rewrite]
    ignore: Language | None
    tokenization: Tokenization
    max_tokens: int | None
    max_chars: int | None
    special: bool


class SearchOptions(QueryOptions, total=False):
    results: Results
    order: Order
    tolerance: float
    batch: int
    max_expansions: int | None
    progress: bool | None


class ProbabilityOptions(QueryOptions, HowProbable, total=False):
    pass


_DEFAULTS = {field.name: field.default for field in fields(Query)}


def _defaults(answer: Any) -> dict[str, Any]:
    return _DEFAULTS | {
        name: each.default for name, each in inspect.signature(answer).parameters.items()
    }


@list_options(SearchOptions, _defaults(Query.best))
def search(lm: CachedTransformer, pattern: Language, **options: Unpack[SearchOptions]) -> Matches:
    """Search the strings of a language that a model would write, most probable first: `Query(...).best(...)`.

    Examples
    --------
    >>> for match in search(lm, "The girl wanted to be a (king|queen)", prefix="The girl wanted to be a"):
    ...     print(match, round(match.log_prob, 2))
    The girl wanted to be a king -6.76
    The girl wanted to be a queen -7.45
    """
    query, rest = _query("search", SearchOptions, lm, pattern, options)
    return query.best(**rest)


@list_options(ProbabilityOptions, _defaults(Query.probability))
def probability(
    lm: CachedTransformer, pattern: Language, **options: Unpack[ProbabilityOptions]
) -> Probability:
    """Compute the probability that a text of a model is in a language: `Query(...).probability(...)`.

    Examples
    --------
    >>> found = probability(lm, "He was (happy|sad)", prefix="He was", end="prefix", runs=0)
    >>> f"between {found.lower:.6f} and {found.upper:.6f}"
    'between 0.006078 and 0.006078'
    """
    query, rest = _query("probability", ProbabilityOptions, lm, pattern, options)
    return query.probability(**rest)


def _query(
    name: str, known: Any, lm: Any, pattern: Any, options: Mapping[str, Any]
) -> tuple[Query, dict[str, Any]]:
    """Return the query of a short form, and the options of its answer."""
    check_options(name, options, known.__annotations__)
    rest = dict(options)
    own = {key: rest.pop(key) for key in options if key in _DEFAULTS}
    return Query(lm, pattern, **own), rest


def warn_of_seam(
    lm: CachedTransformer, prefix: str, texts: Iterable[str], *, ask: bool = False
) -> None:
    """Warn if the tokenizer joins the end of a prefix and the beginning of a text after it into one token.

    Of endless texts, more than half of the first ones must begin so. With `ask`, or if it warns, the model tells
    whether a text lacks its blank.
    """
    looked = [*itertools.islice(texts, MAX_LOOKED)]
    own = lm.context(prefix).tokens
    if not prefix:
        return
    joined = []
    for text in looked:
        with contextlib.suppress(ValueError):  # the model cannot read it
            same = os.path.commonprefix([own, lm.context(prefix + text).tokens])
            if len(same) < len(own):
                kept = b"".join(token.bytes for token in same)
                joined.append((text, kept.decode(errors="ignore")))
    several = len(looked) < MAX_LOOKED or len(joined) > MAX_LOOKED / 2
    if joined and not several:
        return
    suspects = []
    if joined:
        suspects = [joined[0][0]]
    elif ask:
        suspects = looked[:3]
    lacking = next((text for text in suspects if _lacks_blank(lm, prefix, text)), "")
    if lacking:
        warn(
            f"the model writes {' ' + lacking[:30]!r} far more often than {lacking[:30]!r} after "
            f"{prefix[-30:]!r}: begin the texts with their blank"
        )
    elif joined:
        text, better = joined[0]
        warn(
            f"the tokenizer joins the end of {prefix[-30:]!r} and the beginning of {text[:30]!r}. The model would "
            f"hardly write them apart, so the probability is far too small: take the prefix {better[-30:]!r}"
        )


def _lacks_blank(lm: CachedTransformer, prefix: str, text: str) -> bool:
    """Return True if the model expects a text with a blank before it, and the two do not continue one word."""
    if not text or prefix[-1].isspace() or text[0].isspace() or (prefix[-1] + text[0]).isdigit():
        return False
    start = lm.context(prefix)
    begin = text[:MAX_BEGIN]
    with contextlib.suppress(ValueError):  # the vocabulary has no blank, or the context is full
        whole = lm.context(prefix + begin)
        apart = start + f" {begin}"
        one_word = len(apart) > len(whole) and whole.tokens[: len(start)] != start.tokens
        more = apart.log_prob_since(start) - (start + begin).log_prob_since(start)
        return not one_word and more > FAR_MORE
    return False


# ---- reasons


@dataclass(frozen=True)
class Certificate:
    """Result for one token: `rank` 1 is the most probable token; `excluded_by` names a part of the rule, or is None.

    Examples
    --------
    >>> [certificate] = explain(lm, " happy", Rule(top_k=3), prefix="He was")
    >>> certificate.token, certificate.rank, certificate.excluded_by
    (Token(634, ' happy'), 44, 'top_k=3')
    """

    token: Token
    log_prob: float
    rank: int
    excluded_by: str | None

    def __str__(self) -> str:
        text = "end of text" if self.token == EOS else repr(str(self.token))
        line = f"{text:>20}  p {math.exp(self.log_prob):.3g}  rank {self.rank}"
        if self.excluded_by:
            line += f"  excluded by {self.excluded_by}"
        return line


class Explanation(tuple[Certificate, ...]):
    """Certificates of the tokens of a text; true iff the rule excludes none of them.

    Examples
    --------
    >>> explanation = explain(lm, " very sad", Rule(top_k=3), prefix="He was")
    >>> bool(explanation), [certificate.rank for certificate in explanation]
    (False, [1, 7])
    >>> round(explanation.log_prob, 2)
    -5.52
    """

    @property
    def log_prob(self) -> float:
        """Log-probability of the tokens under the model itself, without the rule."""
        return sum(certificate.log_prob for certificate in self)

    def __bool__(self) -> bool:
        return all(certificate.excluded_by is None for certificate in self)

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no tokens: nothing to exclude"


def explain(
    lm: CachedTransformer,
    text: str,
    rule: Rule = NO_RULE,
    *,
    prefix: str | Context = "",
    end: ExplainedEnd = "prefix",
) -> Explanation:
    """Return probability and rank of each token of `text` after `prefix`, and the part of `rule` that excludes it.

    Parameters
    ----------
    text : str
        Text after the prefix; its tokens are those that `lm.context(prefix) + text` appends.
    rule : Rule
        It does not apply to the prefix. Another function is a TypeError.
    prefix : str or Context
    end : "prefix" or "eos"
        "prefix": any text may follow. "eos": the text ends, and the last certificate is that of an eos token.

    Examples
    --------
    >>> explain(lm, " very sad", Rule(top_k=3), prefix="He was")
                 ' very'  p 0.119  rank 1
                  ' sad'  p 0.0337  rank 7  excluded by top_k=3
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"explain names the part of a Rule that excludes a token; {rule!r} is none")
    arguments.text("text", text)
    ends = one_of("end", end, get_args(ExplainedEnd)) == "eos"
    context = as_context(lm, prefix)
    ids = list(map(int, (context + text).tokens[len(context) :]))
    contexts = list(itertools.accumulate(ids, operator.add, initial=context))
    dists = [each.next_token() for each in contexts[: len(ids) + ends]]
    if ends:  # the most probable eos token stands for all
        ids.append(max(lm.vocab.eos_ids, key=dists[-1].log_prob))
    return Explanation([_certificate(dist, id, rule) for dist, id in zip(dists, ids, strict=True)])


def _certificate(dist: TokenDistribution, id: int, rule: Rule) -> Certificate:
    log_probs = dist.log_probs()
    own = float(log_probs[id])
    rank = 1 + int((log_probs > own).sum() + (log_probs[:id] == own).sum())
    excluded = rule.excluded_by(dist, id)
    if own == -math.inf:
        excluded = "the model gives it probability 0"
    return Certificate(dist.support[id], own, rank, excluded)
