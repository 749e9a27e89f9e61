"""Ready-made programs: text under a constraint, text with holes, text after several prompts at once.

They are ordinary Models on one base class, `Program`, which bounds the number of tokens and applies a decision rule.
Sources: Lew et al. 2023, Sec. 2.2; Willard & Louf 2023 for the masks of `ConstrainedText`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from llmppl.constraints.json.schema import JsonSchema
from llmppl.constraints.machine import MachineIndex
from llmppl.constraints.masks import TokenIndex
from llmppl.constraints.vocabulary import EOS, Text, Token, Vocabulary
from llmppl.constraints.vocabulary.text import bytes_of
from llmppl.distributions import (
    NO_RULE,
    DecisionRule,
    Distribution,
    Finite,
    Geometric,
    is_greedy,
    product,
)
from llmppl.lm import ENDS, CachedTransformer, Context, End, TokenDistribution
from llmppl.models.choices import CallSite
from llmppl.models.model import Model
from llmppl.models.spans import Guide, Until, open_path
from llmppl.support import arguments
from llmppl.support.options import check_options, list_options
from llmppl.support.runtime import mask_timer, warn
from llmppl.support.shared import Shared

Mask = NDArray[np.bool_]
BLANK = "[BLANK]"


class StopStrings(Shared):
    """Strings that end a text, sorted and as a set of bytes, so that a search does not read all of them."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings)
        self._encoded = {string.encode() for string in strings}
        self._lengths = sorted({len(data) for data in self._encoded}, reverse=True)

    def first(self, data: bytes, num_new: int) -> tuple[int, int] | None:
        """Return start and end of the first string to end in the last `num_new` bytes, the longest of several."""
        for end in range(len(data) - num_new + 1, len(data) + 1):
            for length in self._lengths:
                start = end - length
                if start >= 0 and data[start:end] in self._encoded:
                    return start, end
        return None

    def settled(self, text: str, num_settled: int) -> str:
        """Return `text` without the longest end after `num_settled` characters that begins one of the strings."""
        longest = self._lengths[0] if self._lengths else 0
        for start in range(max(num_settled, len(text) - longest), len(text)):
            place = bisect_left(self._strings, text[start:])
            if place < len(self._strings) and self._strings[place].startswith(text[start:]):
                return text[:start]
        return text


_stop_strings = functools.lru_cache(16)(StopStrings)


class Options(TypedDict, total=False):
    min_tokens: int
    max_tokens: int | None
    stop: str | Iterable[str]
    rule: DecisionRule


class Program(Model):
    """Base class of the ready-made programs.

    Parameters
    ----------
    min_tokens, max_tokens : int
        Before `min_tokens` tokens, EOS is excluded, and each step is weighed by the probability that it does not come.
        After `max_tokens` tokens the text is cut off, with no weight, and marked `cut`.
    stop : str or list of str
        Strings that end the text as soon as the tokens spell one of them, as EOS does. The stop string and the rest of
        its last token are left out. So a text has the probability that the model writes it and then its first stop
        string. If that comes before `min_tokens` tokens, the weight is zero.
    rule : Rule, or another function from a distribution to one over the same tokens
        Turns the model's next-token distribution into the target's, as in `rule=Rule(temperature=0.5)`. Temperature 0
        is greedy decoding: it applies last, after masks and products, and what a program observes has no rule.

    Attributes
    ----------
    ended : str
        The reason why the text ended: "eos", "complete" (a constraint leaves nothing more, or the model goes on outside
        of it), the stop string, as in "stop '\\n'", or "max_tokens"; "" if it has not ended.

    Examples
    --------
    >>> class Story(Program):
    ...     context = lm.context("Once upon a time")
    ...     def step(self):
    ...         token = self.sample(self.next_token(self.context))
    ...         if self.append(token):
    ...             self.context += token
    >>> story = smc_steer(Story(stop="."), N=4, K=2, seed=0).likeliest
    >>> story.s, story.ended
    (', there was a little girl named Lily', "stop '.'")
    """

    shared = ("labels", "stop", "stops")
    labels: Mapping[str, str] = {}  # keys in `attribution` of the class's own statements, by verb
    deaths: Mapping[str, str] = {}  # reasons of deaths by them, where they say more
    ended: str = ""

    @list_options(Options, {})
    def __init__(
        self,
        *,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        rule: DecisionRule = NO_RULE,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            known = {*_DEFAULTS, *inspect.signature(type(self)).parameters} - {
                "self",
                "unknown",
                "options",
            }
            check_options(type(self).__name__, unknown, known)
        self.min_tokens = arguments.count("min_tokens", min_tokens, least=0)
        self.max_tokens: int | None = arguments.optional_count("max_tokens", max_tokens)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={max_tokens}, not {min_tokens}"
            )
        stops = (
            stop if isinstance(stop, Iterable) and not isinstance(stop, (str, bytes)) else [stop]
        )
        self.stop = tuple(arguments.text("each of stop", text) for text in stops)
        if "" in self.stop:
            raise ValueError('stop must be a text of at least one character, not ""')
        self.stops = _stop_strings(self.stop)
        self.rule = arguments.function("rule", rule, "Rule(top_k=40)")
        self.num_tokens = 0

    @property
    def _late_(self) -> Any:
        return 200 * (self.max_tokens is None), "bound the text by max_tokens="

    def next_token(self, context: Context) -> TokenDistribution:
        """Return the target's distribution of the token after `context`. A greedy rule applies later, to the masked."""
        dist = self.transformer(context)
        return dist if self.rule is NO_RULE or is_greedy(self.rule) else self.rule(dist)

    def before_min_tokens(self) -> bool:
        """Return True if the text may not end yet."""
        return self.num_tokens < self.min_tokens

    def append(self, token: Token) -> bool:
        """Append `token` to the text. Return False if it is EOS, which ends the text and adds nothing."""
        if self.ends(token):
            self._end("eos")
            return False
        self.s += token
        self.num_tokens += 1
        found = self.stops.first(bytes_of(self.s), len(token.bytes))
        if found is not None:
            start, end = found
            stop = bytes_of(self.s)[start:end]
            self.s = Text(bytes_of(self.s)[:start])
            if self.before_min_tokens():
                self._die_("stop", f"a stop string is written before min_tokens={self.min_tokens}")
            self._end(f"stop {stop.decode()!r}")
        elif self.num_tokens == self.max_tokens:
            self._cut_ = True
            self._end("max_tokens")
        return True

    def ends(self, token: Token) -> bool:
        """Return True if a token ends the text."""
        return token == EOS

    def _end(self, reason: str) -> None:
        self.ended = reason
        self.finish()

    def _in_words_(self, verb: str, reason: str, site: CallSite) -> str:
        if site[0].co_filename != __file__:  # a statement of the user's subclass
            return super()._in_words_(verb, reason, site)
        return self.deaths.get(verb, reason) if reason else self.labels.get(verb, verb)


_DEFAULTS = {
    name: each.default for name, each in inspect.signature(Program.__init__).parameters.items()
}
with_program_options = list_options(Options, _DEFAULTS)


def as_context(lm: CachedTransformer, prompt: str | Context) -> Context:
    """Return the context of a prompt, or raise an error that says how to make one."""
    if isinstance(prompt, Context):
        if prompt.lm.vocab != language_model(lm).vocab:
            raise ValueError(
                f"prompt must be a Context of {lm!r}, and it is one of {prompt.lm!r}, with other tokens"
            )
        prompt.check_length()
        return prompt
    if isinstance(prompt, str):
        return language_model(lm).context(prompt)
    raise TypeError(
        f"prompt must be a str or a Context, not {arguments.shown(prompt)}: lm.chat(messages) makes one of messages, "
        "run_many takes many prompts, and the language model comes before its prompt"
    )


def language_model(lm: CachedTransformer) -> CachedTransformer:
    """Return `lm`. TypeError unless it is a CachedTransformer; the error says how to make one."""
    if not isinstance(lm, CachedTransformer):
        raise TypeError(
            f"lm must be a CachedTransformer, not {arguments.shown(lm)}: CachedTransformer.from_pretrained(name) or "
            "CachedTransformer(model, tokenizer) makes one"
        )
    return lm


# ---- text under a constraint


class Written(NamedTuple):
    """Text under a constraint: its bytes and tokens, the state of the constraint, and the reason of its end.

    ended, cut, refused : as the attributes of the program
    death : the verb and the reason of a death, or None
    """

    data: bytes
    num_tokens: int
    state: Any
    ended: str = ""
    cut: bool = False
    refused: str = ""
    death: tuple[str, str] | None = None


class ConstrainedText(Program):
    """The model's continuation of a prompt, given that it satisfies a constraint.

    Tokens are proposed from the allowed ones, with the exact importance weight. The target is the model's own
    distribution over texts, restricted to the language of the constraint. Every text that is not cut is complete. A
    text that a stop string ends is cut.

    Parameters
    ----------
    lm : CachedTransformer
    prompt : str or Context
        The constraint does not apply to the prompt.
    constraint : Regex, Grammar, JsonSchema, type, list of str, index, recognizer, or callable
        As in `Model.extend`. If many tokens fail a callable, also give `mask`.
    end : "boundary", "prefix" or "eos"
        The event that ends a text of the language, and whose probability is part of the target:

        - "boundary": EOS, or a token after which the text is neither in the language nor a prefix of it. This also
          applies at `max_tokens`.
        - "prefix": any continuation, with probability 1. If one text of the language begins with another, both count.
        - "eos": EOS.

        Without a constraint, or with a function, only EOS leaves the language, and "boundary" means "eos".
    complete : bool, optional
        As in `Model.extend`: if True, the text must end within `max_tokens` tokens, and within the length that the
        model can read; else it may be cut there. For a function or a Pattern, texts that have not ended by then die.
    mask : callable, optional
        `mask(text) -> (V,) bool` returns the tokens that may follow the text so far; EOS is True if the text may end.
    **options
        The options of `Program`. If a constraint has infinitely many texts, the default of `max_tokens` is 160 more
        than its shortest text takes, or than `min_tokens` if that is more. With complete=False there is no default.

    Examples
    --------
    >>> program = ConstrainedText(lm, "The girl had a", Regex(" (red|blue) (hat|ball)"))
    >>> smc_steer(program, N=4, K=3, seed=0).best.s
    ' red ball'
    """

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer,
        prompt: str | Context,
        constraint: Any = None,
        *,
        mask: Callable[[str], Mask] | None = None,
        end: End = "boundary",
        complete: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.end: End = arguments.one_of("end", end, ENDS)
        if mask is not None:
            arguments.function("mask", mask, "short_words(vocab, 5)")
        self.context = as_context(lm, prompt)
        self._keeps_refused_ = False  # True if refused texts stay, with their weight
        self._refused_ = ""  # the reason
        self._guide = guide = Guide(
            constraint, lm.vocab, complete, self.max_tokens, self.context.room, self.min_tokens
        )
        self.constraint = guide.function
        self.index = guide.index
        self.mask = mask
        self.state = guide.start
        if self.index is not None:
            _warn_of_seam(self.context, guide)
            _warn_of_names(lm.vocab, constraint)
        self.must_end_by = guide.must_end_by
        if self.must_end_by < self.min_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens}, and the text must end within {guide.bound}"
            )
        if self.must_end_by < math.inf:
            self.max_tokens = None
        demands = [*guide.demands]
        if mask is not None:
            demands.append("the mask")
        if self.min_tokens > 0:
            demands.append(f"min_tokens={self.min_tokens}")
        self.labels = dict.fromkeys(("sample", "score"), " and ".join(demands))

    def step(self) -> None:
        dist = self.next_token(self.context)
        target = self._target(dist)
        token = self._guide.draw(
            self,
            "sample",
            target,
            self.state,
            self.num_tokens,
            self.rule,
            self._own_masks(dist.support),
        )
        if (
            target is not dist and self.end == "prefix" and not is_greedy(self.rule)
        ):  # the weights do not sum to 1
            self.score(target.log_total() - dist.log_total())
        before = Written(bytes_of(self.s), self.num_tokens, self.state)
        context = self.context
        if not self.ends(token):
            self.context = context + token
        text = self._continued(before, token, lambda: self.context)
        self.s = Text(text.data)
        self.num_tokens = text.num_tokens
        self.state = text.state
        self._cut_ = text.cut
        self._refused_ = text.refused
        if text.death is not None:
            self._die_(*text.death)
        if text.ended:
            self._end(text.ended)

    def _continued(self, before: Written, token: Token, context: Callable[[], Context]) -> Written:
        """Return the text after one more token. It reads no attribute that steps change.

        `context()` is the context of the text after the token.
        """
        guide = self._guide
        if guide.ends(before.state, token):
            ended = "eos"
            if guide.index is not None and self.end != "eos":
                ended = "complete"
            return self._checked(before._replace(ended=ended), context)
        data = before.data + token.bytes
        text = Written(data, before.num_tokens + 1, guide.advance(before.state, token))
        found = self.stops.first(data, len(token.bytes))
        if found is not None:
            start, end = found
            text = text._replace(data=data[:start])
            if text.num_tokens < self.min_tokens:
                why = f"a stop string is written before min_tokens={self.min_tokens}"
                return text._replace(death=("stop", why))
            # the end comes before the constraint is satisfied
            text = text._replace(
                ended=f"stop {data[start:end].decode()!r}", cut=guide.index is not None
            )
        elif text.num_tokens == self.max_tokens:
            text = text._replace(ended="max_tokens", cut=True)
        if guide.function is not None:
            fails = guide.fails(Text(text.data))
            if fails:
                return text._replace(death=("condition", fails))
        if (found is None or guide.index is None) and self._is_over(text):
            text = text._replace(ended="complete", cut=False)
        return self._checked(text, context)

    def _checked(self, text: Written, context: Callable[[], Context]) -> Written:
        """Return the text; if it has ended, with the reason why `parse` of the constraint rejects it."""
        if not text.ended or text.cut:
            return text
        guide = self._guide
        reason = guide.refusal(guide.read(Text(text.data), context(), text.num_tokens))
        if self._keeps_refused_:
            return text._replace(refused=reason)
        if reason:
            return text._replace(death=("condition", reason))
        return text

    def ends(self, token: Token) -> bool:
        """Return True if a token ends the text: an EOS, unless the constraint asks for it as a symbol."""
        return self._guide.ends(self.state, token)

    def first_masks(self) -> list[Mask]:
        """Return the masks of the first token by the constraint. It keeps them for the first step."""
        return [*self._guide.masks(self.state, 0)]

    @property
    def parsed(self) -> Any:
        """Value of the text by `parse` of the constraint, or the text itself. ValueError if it has not ended."""
        if self.cut or not self.finished:
            raise ValueError(
                f"{str(self.s)[-40:]!r} is not parsed: the text has not ended; complete=True wants an end"
            )
        return self._guide.parse(self._read)

    @property
    def _read(self) -> str | list[int]:
        """Argument of `parse`: the text, or its tokens if the constraint has special ones."""
        return self._guide.read(self.s, self.context, self.num_tokens)

    @property
    def _late_(self) -> Any:
        is_json = isinstance(self.index, MachineIndex) and isinstance(
            self.index.constraint, JsonSchema
        )
        part = open_path(self.s) if is_json else "the text"
        why = f"{part} runs on, {str(self.s)[-20:]!r}: bound it in the constraint, or the text by max_tokens="
        return self._guide.late, why

    def _target(self, dist: TokenDistribution) -> Finite:
        """Return the target of the next token: `dist`, and if the text may end, EOS with the probability of its end."""
        if self.end == "eos" or (self.index is None and self.end == "boundary"):
            return dist
        if self.index is None:
            return dist.with_end(dist.support.not_eos, self.end)
        return (
            dist.with_end(self.index.mask(self.state), self.end)
            if self.index.accepts(self.state)
            else dist
        )

    def _is_over(self, text: Written) -> bool:
        """Return True if a text must end here, whatever the model says. The end then has probability 1."""
        index = self.index
        if (
            self.end == "eos"
            or index is None
            or self.mask is not None
            or text.num_tokens < self.min_tokens
        ):
            return False
        if not index.accepts(text.state):
            return False
        if self.end == "prefix" and text.num_tokens == self.must_end_by:
            return True
        with mask_timer():
            return len(index.allowed(text.state)) == len(index.vocab.eos_ids)

    def _own_masks(self, vocab: Vocabulary) -> dict[str, Mask]:
        """Return the masks that the next token must satisfy beside those of the constraint, by name."""
        masks = dict[str, Mask]()
        if self.mask is not None:
            with mask_timer():
                masks["the mask"] = self.mask(self.s)
        if self.before_min_tokens():
            masks[f"min_tokens={self.min_tokens}"] = vocab.not_eos
        return masks


def _warn_of_seam(prompt: Context, guide: Guide) -> None:
    """Warn if every text would continue the last word of the prompt."""
    index = guide.index
    word = re.split(r"[\W\d_]", str(prompt.text))[-1]
    is_text = bool(prompt.tokens) and bool(prompt.lm.vocab.tokens[prompt.tokens[-1]])
    if len(word) < 2 or not isinstance(index, TokenIndex | MachineIndex) or not is_text:
        return  # a word begins after a special token, as in a chat
    first = index.next_bytes(index.start)
    if re.fullmatch(rb"[0-9A-Za-z]+", first) and not index.accepts(index.start):
        warn(
            f"the texts of {guide.name} go on inside the last word of the prompt, as in "
            f"{word[-20:] + chr(first[0])!r}: begin them with a blank, unless that is meant"
        )


def _warn_of_names(vocab: Vocabulary, constraint: Any) -> None:
    """Warn if a literal text of a constraint has the name of a special token."""
    texts = getattr(constraint, "literals", [])
    for name in vocab.special_texts.values():
        if any(name in text for text in texts):
            ordinary = f"the literal text {name!r} is spelled with ordinary tokens"
            warn(f"{ordinary}: Special({name!r}) of llmppl.constraints is the special token")


def short_words(vocab: Vocabulary, max_letters: int) -> Callable[[str], Mask]:
    """Return a mask for `ConstrainedText` that allows no word of more than `max_letters` letters (Lew et al. 2023).

    A word is a run of letters. If the prompt may end inside a word, use `lambda text: mask(prompt + text)`. Tokens that
    contain part of a character are excluded, and so are special tokens other than EOS. The masks are computed once.
    """
    max_letters = arguments.count("max_letters", max_letters)
    head = np.zeros(len(vocab), dtype=np.int64)  # letters that extend the last word
    longest = np.zeros(len(vocab), dtype=np.int64)  # letters of the longest further word
    is_text = vocab.lengths > 0
    for i, data in enumerate(vocab.tokens):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            is_text[i] = False
            continue
        head[i] = _num_letters(text)
        runs = itertools.groupby(text[head[i] :], str.isalpha)
        longest[i] = max((is_word * len([*run]) for is_word, run in runs), default=0)
    fits = is_text & (longest <= max_letters)
    fits[list(vocab.eos_ids)] = True
    table = fits & (
        head <= np.arange(min(max_letters, int(head.max())) + 1)[:, None]
    )  # (letters left, V)
    table.setflags(write=False)
    masks: list[Mask] = list(table)

    def mask_after(text: str) -> Mask:
        return masks[min(max_letters - _num_letters(text[: -max_letters - 1 : -1]), len(masks) - 1)]

    return mask_after


def _num_letters(text: str) -> int:
    """Return the number of letters with which `text` begins."""
    return len([*itertools.takewhile(str.isalpha, text)])


# ---- text with holes


class Infilling(Program):
    """Text with holes: the fragments are given, and the model fills the holes between them.

    The first fragment is the prompt. A step fills one hole: it draws a length and tokens, and observes the next
    fragment.

    The target is the joint distribution of the tokens in all holes, each hole followed by the tokens that its fragment
    adds to the context. So a string counts once for every way in which it can be cut into hole tokens and fragments.

    Parameters
    ----------
    lm : CachedTransformer
    fragments : list of str, or a str with [BLANK] for each hole
    lengths : Distribution over 0, 1, 2, ...
        Distribution from which the lengths of holes, in tokens, are drawn.
    prior : bool
        If True, `lengths` is part of the target. If False, it is only the proposal: every length has the same prior
        weight (-log P(length) is added; Lew et al. 2023, Sec. 2.2).
    end : "prefix" or "eos"
        Continuation of the last fragment: anything, or only EOS. EOS inside a hole always has weight zero.
    **options
        The options of `Program`; `min_tokens` and `max_tokens` bound the tokens in all holes together.

    Examples
    --------
    >>> program = Infilling(lm, "The dog was[BLANK] because he was[BLANK].", lengths=Geometric(0.5, max_value=3))
    >>> smc_steer(program, N=4, K=3, seed=0).best.s
    'The dog was sad because he was not scared.'
    """

    labels = {
        "sample": "no end in a hole",
        "score": "the lengths of the holes, which the target leaves open",
        "observe": "the fragments after the holes",
    }
    deaths = {"observe": "the fragment after a hole has probability 0"}

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer,
        fragments: str | Sequence[str],
        *,
        lengths: Distribution | None = None,
        prior: bool = False,
        end: Literal["prefix", "eos"] = "prefix",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        if self.stop:
            raise ValueError(
                f"{type(self).__name__} takes no stop: a hole ends where its fragment begins"
            )
        language_model(lm)
        fragments = fragments.split(BLANK) if isinstance(fragments, str) else fragments
        first, *rest = (arguments.text("each of the fragments", fragment) for fragment in fragments)
        if not rest:
            raise ValueError(
                f"a text with holes has two fragments or more; put {BLANK} where a hole is: {fragments!r}"
            )
        _warn_of_blanks([first, *rest[:-1]])
        self.context = lm.context(first)
        self.s = Text(first)
        self.fragments = tuple(rest)
        self.lengths = Geometric(0.5) if lengths is None else lengths
        if not isinstance(self.lengths, Distribution):
            raise TypeError(f"lengths must be a Distribution over 0, 1, 2, ..., not {lengths!r}")
        self.prior = prior
        self.end: Literal["prefix", "eos"] = arguments.one_of("end", end, ("prefix", "eos"))

    def step(self) -> None:
        length = self.sample(self.lengths)
        if not isinstance(length, (int, np.integer)) or length < 0:
            raise ValueError(
                f"lengths must be a Distribution over 0, 1, 2, ..., but {self.lengths!r} drew {length!r}"
            )
        if not self.prior:
            self.score(-self.lengths.log_prob(length))
        self.num_tokens += length
        if self.max_tokens is not None and self.num_tokens > self.max_tokens:
            self._die_("condition", f"the holes have more tokens than max_tokens={self.max_tokens}")
        for _ in range(length):
            dist = self.next_token(self.context)
            allowed = dist.masked(dist.support.not_eos)
            if is_greedy(self.rule):
                token = self.sample(self.rule(allowed))
            else:
                token = self.sample(dist, proposal=allowed)
            self.s += token
            self.context += token
        fragment, *self.fragments = self.fragments  # type: ignore[assignment]
        self.observe_fragment(fragment)
        if not self.fragments:
            if self.before_min_tokens():
                self._die_(
                    "condition", f"the holes have fewer tokens than min_tokens={self.min_tokens}"
                )
            if self.end == "eos":
                self.observe(self.next_token(self.context), EOS)
            self.finish()

    def observe_fragment(self, fragment: str) -> None:
        """Observe `fragment`. Without a rule, or with a greedy one, one forward pass computes all its tokens."""
        if not fragment:
            return
        end = self.context + fragment
        tokens = end.tokens[len(self.context) :]
        if self.rule == NO_RULE or is_greedy(self.rule):
            self.observe(self.context.next_token().string(), tokens)
        else:
            contexts = itertools.accumulate(tokens[:-1], operator.add, initial=self.context)
            for dist, token in zip(list(map(self.next_token, contexts)), tokens, strict=True):
                self.observe(dist, token)
        self.s += fragment
        self.context = end


def _warn_of_blanks(before_holes: Sequence[str]) -> None:
    """Warn of a blank before a hole. Tokens bring the blank of a word, so the hole would begin inside a word."""
    for fragment in before_holes:
        if fragment.endswith(" "):
            warn(
                f"{fragment[-40:]!r} ends with a blank before a hole, and what fills a hole brings its own, as in "
                f"' dog': leave the blank out, {fragment[-40:].rstrip() + BLANK!r}"
            )


# ---- text after several prompts


class PromptIntersection(Program):
    """Text that is likely after every one of several prompts: the product of the distributions after each.

    Parameters
    ----------
    lm : CachedTransformer, or one for each prompt
        Several models must share a tokenizer.
    prompts : sequence of str (or Context)
    proposal : "product" or "first"
        Both have the same target. "first" draws a token after the first prompt and observes it after the others.
        "product" draws from the normalised product of the distributions, the locally optimal proposal.
    until : str or callable, optional
        Stop, with no weight, when the text ends with this string, or when `until(text)` is true (`ends_sentence`).
    **options
        The options of `Program`.

    Examples
    --------
    >>> program = PromptIntersection(lm, ["The cat was very", "The dog was very"], max_tokens=1)
    >>> smc_steer(program, N=4, K=3, seed=0).best.s
    ' happy'
    """

    labels = {"sample": "the first prompt, over the proposal", "observe": "the other prompts"}
    deaths = {
        "sample": "no token has positive probability after all prompts",
        "observe": "the token that was drawn after the first prompt has probability 0 after another",
    }

    @with_program_options
    def __init__(
        self,
        lm: CachedTransformer | Sequence[CachedTransformer],
        prompts: Sequence[str | Context],
        *,
        proposal: Literal["product", "first"] = "product",
        until: str | Until | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        lms = list(map(language_model, lm if isinstance(lm, Sequence) else [lm] * len(prompts)))
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of at least one prompt, not {prompts!r}")
        arguments.one_of("proposal", proposal, ["product", "first"])
        if len(lms) != len(prompts):
            raise ValueError(
                f"{len(lms)} models for {len(prompts)} prompts: give one model, or one for each prompt"
            )
        if len({each.vocab for each in lms}) > 1:
            raise ValueError(
                f"the models must share a tokenizer: {', '.join(str(each.vocab) for each in lms)} differ"
            )
        self.contexts = list(map(as_context, lms, prompts))
        self.proposal = proposal
        self.until = operator.methodcaller("endswith", until) if isinstance(until, str) else until
        if self.until is not None:
            arguments.function("until", self.until, "ends_sentence")

    def step(self) -> None:
        first, *others = map(self.next_token, self.contexts)
        whole = self.proposal == "product" or is_greedy(self.rule)
        proposal = product(first, *others) if whole else first
        if self.before_min_tokens():
            proposal = proposal.masked(first.support.not_eos)
        if is_greedy(self.rule):
            first = proposal = self.rule(proposal)
            others = []
        token = self.sample(first, proposal=None if proposal is first else proposal)
        for other in others:
            self.observe(other, token)
        if self.append(token):
            self.contexts = [context + token for context in self.contexts]
            if self.until is not None and arguments.truth("until", self.until, self.s):
                self.finish()


def ends_sentence(text: str) -> bool:
    """Return True if the text ends with a full stop, exclamation mark or question mark, and any quotes after it."""
    return re.search(r"[.!?][\"'”’)]*\s*$", text) is not None
