"""Choice among given texts: the exact probability of each under a language model, over all its tokenisations.

The sum over the token sequences of an option begins with the tokenizer's own tokens, which have nearly all of it. Every
other sequence leaves these tokens somewhere. A sequence that spells the beginning of an option and was not continued is
*open*, and its probability bounds what all its continuations can add. The sums are known to within the total of the
open sequences, so the most probable ones are continued until this *rest* is small enough.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args, overload

import numpy as np

from llmppl.constraints import DFA, Part
from llmppl.constraints.values import constraint_of
from llmppl.constraints.vocabulary import encode_fragment
from llmppl.distributions import NO_RULE, DecisionRule, Floats, Table, logsumexp, values_at
from llmppl.inference.run import Limit
from llmppl.lm import ENDS, CachedTransformer, Context, End
from llmppl.models.programs import as_context
from llmppl.queries.compile import INSTEAD
from llmppl.queries.query import warn_of_seam
from llmppl.report.probabilities import Probabilities, Share, key_of
from llmppl.report.tables import TableView, one_line
from llmppl.support import arguments
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import Runtime, warn

Options = Iterable[str] | Mapping[Any, str] | type | Part
Spelling = Literal["all", "canonical"]
ROWS = 64  # next-token distributions of a round; limits act between
MAX_OPTIONS = 1000  # of a type
SELDOM = 0.01  # a smaller mass is said in the repr
WIDE = 1e-3  # bounds that are further apart are a warning
AFTER_LAST = b"\xff"  # no byte of UTF-8 is larger or equal


class HowToChoose(TypedDict, total=False):
    end: End
    rule: DecisionRule
    tokenization: Spelling
    tolerance: float
    max_expansions: int
    timeout: float | None
    budget: int | None


class Choice(Probabilities):
    """Distribution over options, given that the model writes one of them.

    options, texts : list of the options, and dict of their texts
    log_mass, log_mass_upper : float
        Lower and upper bound of the log-probability that the model writes one of the options and ends there.

    Examples
    --------
    >>> choice = choose(lm, "He was", [" happy", " sad"])
    >>> choice.best, f"{choice[' happy']:.2f}"
    (' happy', '0.61')
    >>> f"{math.exp(choice.log_mass):.4f}"                              # that the model writes one of them
    '0.0061'
    """

    def __init__(
        self, shares: Sequence[Share], texts: Sequence[str], log_mass: float, upper: float
    ) -> None:
        self.options = [share.value for share in shares]
        self.texts = dict(zip(self.options, texts, strict=True))
        self._texts = dict(zip(map(key_of, self.options), texts, strict=True))
        self.log_mass = log_mass
        self.log_mass_upper = upper
        mass = math.exp(log_mass)
        header = f"Choice({len(shares)} options)"
        if mass < SELDOM:
            shown = f"{mass:.2g}" if mass else f"exp({self.log_mass:.0f})"
            header += f": the model writes one of these with probability {shown} only"
        super().__init__(shares, header)

    def text_of(self, option: Any) -> str:
        """Return the text of an option; unlike the dict, it tells True from 1."""
        return self._texts[key_of(option)]

    @property
    def width(self) -> float:
        """Largest distance between the bounds of a probability."""
        return max(float(np.ptp(share.interval)) for share in self.shares)


class Choices(TableView, list[Choice]):
    """Choices after several prompts, as a table with a row for each prompt and a column for each option.

    Examples
    --------
    >>> choices = choose(lm, ["He was", "She was"], [" happy", " sad"])
    >>> [choice.best for choice in choices]
    [' happy', ' happy']
    >>> print(choices.to_csv().splitlines()[1][:25])
    He was, happy, happy,0.60
    """

    def __init__(self, choices: Iterable[Choice], prompts: Iterable[Context]) -> None:
        super().__init__(choices)
        self.prompts = [str(prompt.text) for prompt in prompts]

    def records(self) -> list[dict[str, Any]]:
        """Return a dict for each prompt and option: the prompt, and the option's text, probability and bounds."""
        rows = []
        for prompt, choice in zip(self.prompts, self, strict=True):
            for share in choice.shares:
                rows.append(
                    {
                        "prompt": prompt,
                        "text": choice.text_of(share.value),
                        **share._asdict(),
                        "log_mass": choice.log_mass,
                    }
                )
        return rows

    def _header(self) -> str:
        return f"{len(self)} choices"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        options = self[0].options if self else []
        rows = []
        for prompt, choice in zip(self.prompts, self, strict=True):
            shares = [str(choice.share(option)) for option in options]
            rows.append([*shares, one_line(prompt)])
        return [*map(one_line, options), "prompt"], rows


_DEFAULTS = {
    "end": "boundary",
    "rule": NO_RULE,
    "tokenization": "all",
    "tolerance": 5e-4,
    "max_expansions": 200,
}


@overload
def choose(
    lm: CachedTransformer, prompt: str | Context, options: Options, **how: Unpack[HowToChoose]
) -> Choice: ...
@overload
def choose(
    lm: CachedTransformer,
    prompt: list[str] | list[Context],
    options: Options,
    **how: Unpack[HowToChoose],
) -> Choices: ...


@list_options(HowToChoose, _DEFAULTS)
def choose(
    lm: CachedTransformer, prompt: Any, options: Options, **how: Unpack[HowToChoose]
) -> Choice | Choices:
    """Compute the probability of each of some texts after a prompt, given that the model writes one of them.

    The probability of a text is the sum over all token sequences that spell it. It begins with the tokenizer's own
    tokens, whatever the length of the text.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str, Context, or a list of these, which shares batches and gives a table, `Choices`
    options : list of str, dict, type or constraint
        The texts, with the blank that they begin with: [" yes", " no"]. A dict maps each label to its text. A type is a
        bool, an Enum or a Literal, whose labels are its values. A constraint has at most 1,000 texts.
    end : str
        Event that ends an option: "boundary" (the next token leaves the options), "eos", or "prefix" (anything may
        follow, so no option may begin another).
    rule : Rule, or another function from a distribution to one over the same tokens
    tokenization : str
        "all", or "canonical": each text in the tokenizer's own tokens alone, at the lowest cost.
    tolerance : float
        Stop summing when the rest is at most this share of the sum. Each probability is then known to within it.
    max_expansions : int
        Largest number of next-token distributions beside those of the tokenizer's own tokens, for each option. If it
        is reached, certain bounds contain the probability, and a warning says so where they are wide.
    timeout, budget : float and int, optional
        Seconds, and tokens that the language model runs. A limit before the end of the tokenizer's own tokens is a
        TimeoutError. A later one leaves bounds.

    Returns
    -------
    Choice
        A mapping from option to probability. ValueError if no option has a positive probability.

    Examples
    --------
    >>> choose(lm, "He was", [" happy", " sad"]).best
    ' happy'
    """
    check_options("choose", how, HowToChoose.__annotations__)
    given: dict[str, Any] = _DEFAULTS | how
    end = arguments.one_of("end", given["end"], ENDS)
    rule = arguments.function("rule", given["rule"], "Rule(top_k=40)")
    spelling = arguments.one_of("tokenization", given["tokenization"], get_args(Spelling))
    canonical = spelling == "canonical"
    tolerance = arguments.probability("tolerance", given["tolerance"])
    max_expansions = arguments.count("max_expansions", given["max_expansions"], least=0)
    labels, listed = _labelled(options)
    several = isinstance(prompt, list | tuple)
    prompts = prompt if several else [prompt]
    contexts = [as_context(lm, each) for each in prompts]
    runtime = Runtime()
    runtime.watch(lm.evaluator)
    limit = Limit(runtime, given.get("timeout"), given.get("budget"))
    texts = Texts(lm, listed, end, limit)
    for each in prompts:
        if isinstance(each, str):
            warn_of_seam(lm, each, listed, ask=True)
    sums = [Sums(texts, context, rule, canonical) for context in contexts]
    reached = sum_up(sums, tolerance, 0 if canonical else max_expansions, limit)
    choices = [each.choice(labels, listed) for each in sums]
    _warn_of_bounds(choices, contexts, reached, max(tolerance, WIDE))
    return Choices(choices, contexts) if several else choices[0]


class Texts:
    """Texts of the options in the order of their bytes, in which those with a common beginning are neighbours.

    own : list of the tokenizer's own tokens of each text
    """

    def __init__(self, lm: CachedTransformer, texts: Sequence[str], end: End, limit: Limit) -> None:
        self.vocab = lm.vocab
        self.end = end
        self.order = sorted(range(len(texts)), key=lambda i: texts[i].encode())
        self.data = [texts[i].encode() for i in self.order]
        for text, after in itertools.pairwise(self.data):
            if end == "prefix" and after.startswith(text):
                wanted = 'take end="boundary" or end="eos"'
                raise ValueError(f'with end="prefix" no option may begin another: {wanted}')
        self.own = list[list[int]]()
        for i in self.order:
            if reached := limit.reached(list):
                raise TimeoutError(_late(reached, len(texts)))
            self.own.append(encode_fragment(lm.tokenizer, lm.vocab, texts[i]))

    def after(self, data: bytes) -> tuple[int, int]:
        """Return the range of the texts that begin with some bytes."""
        return bisect_left(self.data, data), bisect_left(self.data, data + AFTER_LAST)

    def ends(self, data: bytes) -> bool:
        """Return True if the bytes are a text, and no token after them can matter."""
        first, last = self.after(data)
        return self.end != "eos" and last - first == 1 and self.data[first] == data

    def tokens(self, data: bytes) -> list[int]:
        """Return the tokens after which some bytes still begin a text."""
        rests = [text[len(data) :] for text in self.data[slice(*self.after(data))]]
        longest = min(max(map(len, rests)), int(self.vocab.lengths.max()))
        spelled = list[int]()
        for length in range(1, longest + 1):
            for piece in {rest[:length] for rest in rests if len(rest) >= length}:
                spelled += self.vocab.ids_by_bytes.get(piece, ())
        return spelled


class _Open(NamedTuple):
    """Open sequence: the log-probability of its tokens, and the bytes that they spell."""

    log_prob: float
    data: bytes


class Sums:
    """Sums of the probabilities of the token sequences that spell each option, after one prompt.

    found : (n,) log of the sum so far of each text, in the order of `Texts`
    open : the open sequences, by their contexts
    """

    def __init__(self, texts: Texts, start: Context, rule: DecisionRule, canonical: bool) -> None:
        self.texts = texts
        self.start = start
        self.rule = rule
        self.found: Floats = np.full(len(texts.data), -np.inf)
        self.open = dict[Context, _Open]()
        self.expansions = 0
        ends = {reduce(operator.add, tokens, start) for tokens in texts.own}
        self._ends = ends if canonical else None
        self._reach(start, 0.0, b"")

    def own(self) -> Iterator[tuple[Sums, Context]]:
        """Yield the sequences of the tokenizer's own tokens that must be expanded, each once, from short to long."""
        seen = set()
        for tokens in self.texts.own:
            for context, data in self._path(tokens):
                if context not in seen and not self.texts.ends(data):
                    seen.add(context)
                    yield self, context

    def _path(self, tokens: Iterable[int]) -> Iterator[tuple[Context, bytes]]:
        """Yield the contexts from the prompt to the end of some tokens, with their bytes."""
        context = self.start
        data = b""
        yield context, data
        for token in tokens:
            context = context + token
            data = data + self.texts.vocab.tokens[token]
            yield context, data

    def unsure(self, tolerance: float, max_expansions: int) -> list[tuple[Sums, Context]]:
        """Return the fewest sequences without which the rest is small enough, up to a number for each option."""
        likely = sorted(self.open, key=lambda context: self.open[context].log_prob)
        log_probs = [self.open[context].log_prob for context in likely]
        rest = np.logaddexp.accumulate([-np.inf, *log_probs])
        enough = logsumexp(self.found) + (math.log(tolerance) if tolerance else -math.inf)
        number = min(int((rest > enough).sum()), max_expansions * self.found.size - self.expansions)
        self.expansions += number
        return [(self, context) for context in likely[::-1][:number]]

    def expand(self, context: Context, table: Table) -> None:
        """Continue a sequence, if it has a probability, by each token that spells a text."""
        reached = self.open.pop(context, None)
        if reached is None or table.log_total == -math.inf:
            return
        before, data = reached
        tokens = self.texts.tokens(data)
        first, _ = self.texts.after(data)
        if self.texts.data[first] == data:
            self._add(context, first, before + self._ending(table, tokens))
        rows = np.zeros(len(tokens), np.int64)
        log_weights = values_at([table], rows, np.array(tokens, np.int64))
        for token, log_weight in zip(tokens, log_weights.tolist(), strict=True):
            if log_weight > -math.inf:
                log_prob = before + log_weight - table.log_total
                self._reach(context + token, log_prob, data + self.texts.vocab.tokens[token])

    def _ending(self, table: Table, tokens: list[int]) -> float:
        """Return the log-probability that a text ends, where the tokens continue it to another text."""
        log_probs = table.whole(table.log_total)
        if self.texts.end == "eos":
            return float(logsumexp(log_probs[list(self.texts.vocab.eos_ids)]))
        return float(logsumexp(np.delete(log_probs, tokens)))

    def _reach(self, context: Context, log_prob: float, data: bytes) -> None:
        """Add a sequence to the sum, or to the open ones if the model can read it."""
        if self.texts.ends(data):
            self._add(context, self.texts.after(data)[0], log_prob)
        elif context.room >= 0:
            self.open[context] = _Open(log_prob, data)

    def _add(self, context: Context, text: int, log_prob: float) -> None:
        if self._ends is None or context in self._ends:
            self.found[text] = np.logaddexp(self.found[text], log_prob)

    def choice(self, labels: Sequence[Any], texts: Sequence[str]) -> Choice:
        """Return the probabilities with their bounds, by the sums and the rest."""
        if self._ends is not None:
            self.open.clear()
        log_mass = logsumexp(self.found)
        upper = logsumexp([log_mass, *(each.log_prob for each in self.open.values())])
        if log_mass == -math.inf:
            raise ValueError(self._nothing(upper))
        left = np.full(self.found.size, -np.inf)  # log of the part of the rest that a text can get
        for log_prob, data in self.open.values():
            some = slice(*self.texts.after(data))
            left[some] = np.logaddexp(left[some], log_prob)
        most = np.logaddexp(self.found, left) - np.logaddexp(log_mass, left)
        logs = np.column_stack([self.found - log_mass, self.found - upper, most])
        bounds = np.exp(logs[np.argsort(self.texts.order)]).tolist()
        shares = [Share(label, *each) for label, each in zip(labels, bounds, strict=True)]
        return Choice(shares, texts, log_mass, upper)

    def _nothing(self, upper: float) -> str:
        """Return why no option has a probability."""
        after = f"after {str(self.start.text)[-40:]!r} under {self.rule!r}"
        if upper == -math.inf:
            return f"no option has a positive probability {after}"
        return (
            f"no option was completed {after}, which excludes the tokenizer's own tokens of each. "
            f"All together have probability {math.exp(upper):.2g} at most; "
            f"a larger max_expansions than {self.expansions} continues"
        )


def sum_up(sums: Sequence[Sums], tolerance: float, max_expansions: int, limit: Limit) -> str:
    """Compute sums of one or several prompts in shared batches. Return the limit that ended it, or "".

    Raises a TimeoutError at a limit before the end of the tokenizer's own tokens.
    """
    reached = _expand(itertools.chain.from_iterable(each.own() for each in sums), limit)
    if reached:
        raise TimeoutError(_late(reached, max(len(each.texts.data) for each in sums)))
    while not reached:
        lists = [each.unsure(tolerance, max_expansions) for each in sums]
        unsure = [*itertools.chain(*lists)]
        if not unsure:
            break
        reached = _expand(unsure, limit)
    return reached


def _expand(items: Iterable[tuple[Sums, Context]], limit: Limit) -> str:
    """Expand sequences of one or several prompts, a batch at a time. Return the limit that ended it, or ""."""
    items = iter(items)
    while batch := [*itertools.islice(items, ROWS)]:
        if reached := limit.reached(list):
            return reached
        nexts = [context.next_token() for _, context in batch]  # computed together
        for (sums, context), each in zip(batch, nexts, strict=True):
            sums.expand(context, sums.rule(each).table())
    return ""


def _late(reached: str, number: int) -> str:
    """Return the message of a limit that came before the tokenizer's own tokens were read."""
    return (
        f"the {reached} was reached before the tokens of each of {number:,} options were read: "
        f"give fewer options, or a larger {reached}"
    )


def _warn_of_bounds(
    choices: list[Choice], contexts: list[Context], reached: str, wide: float
) -> None:
    """Warn of the widest bounds."""
    widths = [each.width for each in choices]
    if max(widths, default=0.0) <= wide:
        return
    worst = int(np.argmax(widths))
    (least, _), *others = (share.interval for share in choices[worst].shares)
    order = ""
    if any(high > least for _, high in others):
        order = ", which leaves their order open"
    warn(
        f"the probabilities of the options after {str(contexts[worst].text)[-40:]!r} are known "
        f"to within {widths[worst]:.2g} only{order}, over all tokenisations. "
        f"A larger {reached or 'max_expansions'} narrows the bounds, "
        'and tokenization="canonical" takes the tokenizer\'s own tokens alone'
    )


def _texts_of(part: Part, options: Any) -> list[str]:
    """Return the texts of a constraint. TypeError if they are many, or it has no automaton."""
    automaton = None
    if isinstance(part, DFA) or isinstance(options, Part):  # a type whose values are JSON has none
        automaton = part.automaton
    found = [] if automaton is None else [*itertools.islice(automaton.enumerate(), MAX_OPTIONS + 1)]
    if not 0 < len(found) <= MAX_OPTIONS:
        raise TypeError(
            "options must be a list of str, a dict, a type with few values, such as bool, an Enum or a Literal, or a "
            f"constraint with few texts, not {arguments.shown(options)}"
        )
    return [text for text in found if text in part]


def _without_specials(option: Any) -> None:
    """Raise a TypeError for a constraint with special tokens."""
    if isinstance(option, Part) and option.special_tokens:
        has = f"{arguments.shown(option)} has the special token {option.special_tokens[0]!r}"
        raise TypeError(f"options are texts, and {has}: {INSTEAD}")


def _labelled(options: Options) -> tuple[list[Any], list[str]]:
    """Return the label and the text of each option."""
    if arguments.is_type(options):
        language = constraint_of(options)
        found = _texts_of(language, options)
        return [*map(language.parse, found)], found
    if isinstance(options, Part):
        _without_specials(options)
        found = _texts_of(options, options)
        return found, found
    if isinstance(options, str) or not isinstance(options, Iterable):
        raise TypeError(
            f'options must be a list of str, as [" yes", " no"], not {arguments.shown(options)}'
        )
    labels = [*options]
    texts = [*options.values()] if isinstance(options, Mapping) else labels
    if not labels:
        raise ValueError("options must have at least one text")
    for text in texts:
        _without_specials(text)
        arguments.text("each of options", text)
    if len(set(texts)) < len(texts):
        raise ValueError(f"options must differ: {arguments.shown(options)}")
    return labels, texts
