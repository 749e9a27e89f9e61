"""Spans: a word, a line, a sentence or a value, drawn token by token within one step.

Every token is a choice of its own, from the model's distribution p after the tokens before it. If not all tokens are
allowed, it is proposed from the allowed ones. With A_i the tokens allowed at place i, a span v_1 ... v_n of
log-probability  sum_i log p(v_i)  is drawn with the weight  prod_i p(A_i).  Under inference it then has the probability
prod_i p(v_i), restricted to the allowed spans. There is no selection between the tokens of a span. If a constraint is
rarely satisfied, use one step for each token instead.

A `Guide` restricts the tokens of a span, and of a `ConstrainedText`, to those that a constraint and a bound allow.
"""

import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.automata.dfa import DFA
from llmppl.constraints.constraint import Index
from llmppl.constraints.values import index_of
from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.distributions import NO_RULE, DecisionRule, Finite, is_greedy
from llmppl.lm import Context
from llmppl.support import arguments
from llmppl.support.runtime import mask_timer
from llmppl.support.shared import Shared

MAX_NAME = 48  # characters of a constraint's repr that is used as its name
NEAR = 64  # tokens left, beside the shortest text, from which on a text plans its end
MAX_EXPLORED = 20_000  # states that are read to find the shortest text
MORE_TOKENS = 160  # than the shortest text takes, for a text that could go on without end
LATE = 120  # tokens more than the shortest text takes, after which a text runs on
Until = Callable[[str], bool | np.bool_]


class Span(NamedTuple):
    """Result of `Model.extend`.

    text : str, the text of the tokens
    context : Context, the given one plus these tokens; an EOS is not added
    log_prob : float
        The log-probability of the tokens, and of the EOS if there is one, after the given context and under the rule.
        Constraints do not change it, nor does a greedy rule.
    ended : "until", "eos" or "max_tokens"
        The end of the span. It is also "max_tokens" if the particle died outside of a step.
    parsed : object
        The value of the text by `parse` of the constraint, such as an int; the text itself if the constraint has no
        `parse`; None for a span that was cut.

    Examples
    --------
    >>> span = Model().extend(lm.context("Once upon a time"), until=".", rule=Rule(temperature=0))
    >>> span.text, span.ended
    (', there was a little girl named Lily.', 'until')
    >>> span.context
    Context('Once upon a time, there was a little girl named Lily.')
    """

    text: Text
    context: Context
    log_prob: float
    ended: str
    parsed: Any = None


class Guide(Shared):
    """Tokens that a constraint and a bound allow in a text, and the reasons of deaths by them.

    A reason is one sentence that names the constraint or the bound, and nothing that differs between particles.

    constraint, complete, max_tokens : as in `Model.extend`, with the same errors
    room : float, number of tokens that the model can still read
    least : int or None, the shortest text that is wanted; None if there is no default of `max_tokens`
    index : Index of the constraint, or None
    function : the constraint if it is a function of the text, or None
    parse : function from a text that has ended to its value; that of the constraint, else of its index
    reads_tokens : bool, True if `parse` reads the tokens, because the constraint has special ones
    start : state of the constraint before the text
    fits : test of a state and a token, or None; it stands for the masks of an index whose masks test all tokens
    must_end_by : float, number of tokens after which the text must have ended; infinity if it may be cut
    late : float, number of tokens after which a text runs on; infinity if it may not, or if `max_tokens` is given
    """

    def __init__(
        self,
        constraint: Any,
        vocab: Vocabulary,
        complete: bool | None,
        max_tokens: int | None,
        room: float = math.inf,
        least: int | None = None,
    ) -> None:
        self.index = _index_of(constraint, vocab)
        self.vocab = vocab
        self.max_tokens = max_tokens
        self.room = room
        self.function = constraint if self.index is None else None
        own = None if arguments.is_type(constraint) else constraint
        self.reads_tokens = bool(getattr(own, "special_tokens", ()))
        self.parse: Callable[[Any], Any] = getattr(self.index, "parse", str)
        if not self.reads_tokens:
            self.parse = getattr(own, "parse", self.parse)
        self.start = getattr(self.index, "start", None)
        self.fits = getattr(self.index, "fits", None)
        self._given = max_tokens is not None
        self._plans_from = sys.maxsize if self._given else NEAR  # tokens left
        self.late: float = math.inf if self._given else MORE_TOKENS
        if least is not None and self.index is not None and max_tokens is None:
            find = cached_shortest if arguments.is_hashable(self.index) else _shortest
            shortest = find(self.index)
            self.late = max(shortest, least) + LATE
            if shortest < math.inf and complete is not False:
                self.max_tokens = max(int(shortest), least) + MORE_TOKENS
                self._plans_from += int(shortest)
        self.must_end_by = self._must_end_by(complete)

    def _must_end_by(self, complete: bool | None) -> float:
        index = self.index
        bound = min(self.room, math.inf if self.max_tokens is None else self.max_tokens)
        if complete is None:
            complete = index is not None and bound < math.inf
        if not complete:
            return math.inf
        if bound == math.inf:
            raise ValueError("complete=True wants max_tokens, after which the text must have ended")
        is_far = bound > self._plans_from  # the shortest text would take longer to find
        if index is None or is_far or index.mask_within(index.start, bound).any():
            return bound
        # the question of an error is bounded
        shortest = index.tokens_to_accept(index.start, 4 * bound)
        said = f"{self.name}: no text ends within {self.bound}"
        if shortest < math.inf:
            said += f", the shortest takes {shortest} tokens"
        raise ValueError(f"{said}: give room, or complete=False to cut it there")

    @property
    def name(self) -> str:
        """Short name of the constraint."""
        index = self.index
        if self.function is not None:
            return arguments.name_of(self.function)
        if index is None:
            return "the text"
        made_from = getattr(index, "constraint", None) or getattr(index, "recognizer", index)
        made_from = getattr(made_from, "constraint", made_from)
        name = repr(made_from)
        short = type(made_from).__name__
        strings = getattr(made_from, "strings", None)
        if strings is not None:
            name = f"the list {[*strings]}"
            short = f"the list of {len(strings)} strings"
        if getattr(made_from, "literals", ()) or getattr(made_from, "special_tokens", ()):
            short = arguments.shown(made_from, MAX_NAME)  # the name of its class says nothing
        return short if len(name) > MAX_NAME or name.startswith("<") else name

    @property
    def bound(self) -> str:
        """Bound on the tokens, in words."""
        if self.max_tokens is not None and self.max_tokens <= self.room:
            return f"max_tokens={self.max_tokens}{'' if self._given else ', the default'}"
        tokens = "token" if self.room == 1 else "tokens"
        return f"the {self.room:g} {tokens} that the model can read after the prompt"

    @property
    def demands(self) -> list[str]:
        """Names of the restrictions that the masks express."""
        names = []
        if self.index is not None:
            names.append(self.name)
        if self._given and self.must_end_by < math.inf:
            names.append(f"an end within {self.bound}")
        return names

    def draw(
        self,
        model: Any,
        verb: str,
        dist: Finite,
        state: Any,
        num_tokens: int,
        rule: DecisionRule,
        more: Mapping[str, NDArray[np.bool_]] = MappingProxyType({}),
    ) -> Any:
        """Draw the token after the first `num_tokens` from `dist`, proposed from the allowed ones.

        `more` are further masks, each with its name. A greedy rule applies after the masks. The result is None if the
        particle died by hand, outside of a step.
        """
        proposal: Any = dist
        for mask in (*self.masks(state, num_tokens), *more.values()):
            proposal = proposal.masked(mask)
        greedy = is_greedy(rule)
        if self.fits is not None:
            accepted = proposal.where(functools.partial(self.fits, state))
            proposal = proposal.masked(accepted.log_measures(1) > -math.inf) if greedy else accepted
        if greedy:
            dist = proposal = rule(proposal)

        explain = functools.partial(self.dead_end, state, num_tokens, rule, more)
        return model._draw_(verb, dist, None if proposal is dist else proposal, explain)

    def dead_end(self, state: Any, num_tokens: int, rule: DecisionRule, more: Iterable[str]) -> str:
        """Return why no token may follow. `more` are the names of further masks."""
        under = ""
        if rule != NO_RULE and not is_greedy(rule):
            under = f" under {rule!r}, applied before the mask: a temperature or a weaker rule keeps more tokens"
        index = self.index
        left = self.must_end_by - num_tokens
        if left == 0 or (
            index is not None and left < math.inf and not index.mask_within(state, left).any()
        ):
            return f"{self.name} cannot end within {self.bound}: give room{under}"
        demands = " and ".join([*self.demands, *more])
        if demands:
            return f"no token allowed by {demands} has positive probability{under}"
        return f"no token has positive probability{under}"

    def masks(self, state: Any, num_tokens: int) -> Iterator[NDArray[np.bool_]]:
        """Yield masks that the token after the first `num_tokens` must satisfy."""
        left = self.must_end_by - num_tokens
        if self.index is not None and self.fits is None:
            with mask_timer():
                if left > self._plans_from:
                    yield self.index.mask(state)
                else:
                    yield self.index.mask_within(state, left)
        if left == 0:
            yield self.vocab.only_eos

    def ends(self, state: Any, token: Token) -> bool:
        """Return True if a token ends the text: an EOS, unless the constraint asks for it as a symbol."""
        return token == EOS and (self.index is None or self.index.accepts(state))

    def advance(self, state: Any, token: Token) -> Any:
        """Return the state of the constraint after one more token."""
        if self.index is None:
            return None
        with mask_timer():
            return self.index.advance(state, token)

    def read(self, text: str, context: Context, num_tokens: int) -> str | list[int]:
        """Return the argument of `parse`: a text, or its tokens, the last ones of a context."""
        if not self.reads_tokens:
            return text
        return context.node.tokens()[len(context) - num_tokens :]

    def refusal(self, read: str | list[int]) -> str:
        """Return why `parse` rejects a finished text that the masks allowed, or a function an empty one; else ""."""
        try:
            self.parse(read)
        except ValueError as error:
            return (
                f"{self.name} refuses the finished text, larger N would try more of them: {error}"
            )
        return "" if read else self.fails("")

    def fails(self, text: str) -> str:
        """Return why the text so far does not satisfy the constraint, a function; "" if it does."""
        if self.function is None or arguments.truth("constraint", self.function, text):
            return ""
        return f"{self.name} is false of the text"


class Extent(Guide):
    """Arguments of `Model.extend`, checked: the allowed tokens and the end of a span."""

    def __init__(
        self,
        context: Context,
        until: str | Until | None,
        max_tokens: int | None,
        constraint: Any,
        complete: bool | None,
    ) -> None:
        if not isinstance(context, Context):
            raise TypeError(
                f"extend wants a Context, lm.context(text), not {arguments.shown(context)}"
            )
        if until == "":
            raise ValueError('until must be a text of at least one character, not ""')
        if isinstance(until, str):
            until = operator.methodcaller("__contains__", arguments.text("until", until))
        elif until is not None:
            arguments.function("until", until, "ends_sentence")
        max_tokens = arguments.optional_count("max_tokens", max_tokens)
        super().__init__(
            constraint,
            context.lm.vocab,
            complete,
            max_tokens,
            least=None if until is not None else 0,
        )
        if until is None and max_tokens is None and self.index is None:
            raise ValueError(
                "extend wants to know where the span ends: give until='.', a constraint such as Regex(...), or "
                "max_tokens=20"
            )
        self.until = until
        self.cut_after = max_tokens if self.must_end_by == math.inf else None

    def is_over(self, state: Any, text: Text, read: str | list[int]) -> bool:
        """Return True if the span ends with `text`: `until` holds, and the constraint accepts it."""
        if self.index is not None and not self.index.accepts(state):
            return False
        over = self.index is not None
        if self.until is not None:
            over = arguments.truth("until", self.until, text)
        return over and not self.refusal(read)


def extend(model: Any, context: Context, extent: Extent, rule: DecisionRule) -> Span:
    """Draw a span after `context` as choices of the particle `model`; see `Model.extend`."""
    arguments.function("rule", rule, "Rule(top_k=40)")
    text = Text()
    log_prob = 0.0
    state = extent.start
    num_tokens = 0
    while num_tokens != extent.cut_after and not model.finished:
        dist = model.transformer(context)
        if rule is not NO_RULE and not is_greedy(rule):
            dist = rule(dist)
        token = extent.draw(model, "extend", dist, state, num_tokens, rule)
        if token is None:
            break
        log_prob += dist.log_prob(token)
        ends = extent.ends(state, token)
        if not ends:
            text += token
            context += token
            num_tokens += 1
            state = extent.advance(state, token)
        read = extent.read(text, context, num_tokens)
        refusal = extent.refusal(read) if ends else extent.fails(text)
        if refusal:
            model._die_("extend", refusal)
        elif ends or extent.is_over(state, text, read):
            return Span(text, context, log_prob, "eos" if ends else "until", extent.parse(read))
    return Span(text, context, log_prob, "max_tokens")


def _index_of(constraint: Any, vocab: Vocabulary) -> Index | None:
    """Return the index of a constraint. It is cached, because a step needs it again and again."""
    if constraint is None:
        return None
    if isinstance(constraint, list):
        constraint = tuple(constraint)
    is_constant = isinstance(constraint, Shared | tuple) or arguments.is_type(constraint)
    find = cached_index_of if is_constant and arguments.is_hashable(constraint) else index_of
    return find(constraint, vocab)


cached_index_of = functools.lru_cache(16)(index_of)


def _shortest(index: Index) -> float:
    """Return the number of tokens of the shortest text; inf if the language is finite, or too large to read."""
    recognizer = getattr(index, "recognizer", None)
    try:
        if isinstance(recognizer, DFA) and recognizer.explore(MAX_EXPLORED).is_finite():
            return math.inf
        return index.tokens_to_accept(index.start, MAX_EXPLORED)
    except ValueError:  # it is too large
        return math.inf


cached_shortest = functools.lru_cache(16)(_shortest)


def open_path(text: str) -> str:
    """Return the path of the value that a JSON text so far is in, as `Particles.by` takes it: "parsed.pets[0].name"."""
    levels: list[Any] = [["", 0, "parsed"]]  # bracket, number of commas, name of the member
    for part in re.findall(r'"(?:[^"\\]|\\.)*"?|[][{},]', text, re.DOTALL):
        if part in "{[":
            levels.append([part, 0, ""])
        elif part in "}]":
            levels.pop()
        elif part == ",":
            levels[-1][1:] = levels[-1][1] + 1, ""
        else:
            levels[-1][2] = levels[-1][2] or part.strip('"')
    path = ""
    for bracket, at, name in levels:
        path += f"[{at}]" if bracket == "[" else f".{name}"
    return path.strip(".")
